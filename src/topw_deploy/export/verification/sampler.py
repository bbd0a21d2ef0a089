"""Compare the sampler node with the float64 reference, under Top-W and under other rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx_ir as ir

from topw_deploy.export.embedding import EmbeddingTable, find_embedding, stored_array
from topw_deploy.export.graph import constant_of, required_node_input
from topw_deploy.export.sampler.attach import sampler_node
from topw_deploy.export.sampler.node import GEOMETRY_INPUTS, SAMPLER_INPUTS
from topw_deploy.export.verification.reference import SamplerProbe
from topw_deploy.manifest import MODEL_NAME, Check, NotCompared, SamplerInfo
from topw_deploy.sampling import (
    FLOAT32_TIES,
    Geometry,
    RuleParameters,
    SampledRow,
    TopWOptions,
    TopWParameters,
    draw,
    pack_mask,
    sample_row,
)

LOGPROB_BOUND = 1e-4
# Fewest rows without a tie; fewest of them without a certificate, whose crop depends on distances; and fewest under a
# mask. Four rows of logits give at least 28 rows, and 8 under a mask.
FEWEST_ROWS, FEWEST_UNCERTIFIED, FEWEST_MASKED = 20, 12, 6
_CONSTRUCTED_ROWS = 4
_MASKED_SETTINGS = 2  # number of `_settings`, from the first, that are compared under a mask
_TOKENS_PER_CROP = 6  # that are drawn; all of a smaller crop
_LARGEST_BATCH = 32
_POOL_VALUES = 8_000_000  # features of pool tokens in a batch; the graph holds several copies of 4 bytes each
_TOKENS_MEASURED = 48  # whose neighbour bound is checked, against distances to all tokens
_ANSWERS = ("kept sets", "tokens", "certificates")


@dataclass
class _Tally:
    """Counts of compared rows.

    rows: all rows.
    ties: rows on a tie, which are not judged, or not their token.
    uncertified: judged rows without a certificate.
    wrong: the number of rows in which each answer is wrong.
    worst_logprob: the largest difference of a log-probability.
    needs_certificates: whether a missing certificate is wrong; under Top-W, it only costs time.
    """

    rows: int = 0
    ties: int = 0
    uncertified: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    worst_logprob: float = 0.0
    needs_certificates: bool = False

    @property
    def has_enough(self) -> bool:
        """Whether enough rows were judged without a mask."""
        return self.compared >= FEWEST_ROWS and self.uncertified >= FEWEST_UNCERTIFIED

    @property
    def compared(self) -> int:
        """The number of judged rows."""
        return self.rows - self.ties

    def add_all(self, answers: Iterable[tuple[SampledRow, dict[str, np.ndarray]]]) -> None:
        """Judge rows. answers: the reference's and the node's outputs, of each row."""
        for expected, found in answers:
            self._add(expected, found)

    def _add(self, expected: SampledRow, found: dict[str, np.ndarray]) -> None:
        self.rows += 1
        if expected.ties.allow_other_set(FLOAT32_TIES):
            self.ties += 1
            return
        self.uncertified += not expected.certified
        self.wrong["kept sets"] += bool(found["kept"] != expected.kept)
        if found["certified"] != expected.certified and not expected.ties.allow_other_certified(FLOAT32_TIES):
            self.wrong["certificates"] += bool(found["certified"]) or self.needs_certificates
        if expected.draw_margin <= FLOAT32_TIES.draw:
            self.ties += 1
        elif found["next_token"] != expected.next_token:
            self.wrong["tokens"] += 1
        else:  # NaN if one is, and the check then fails
            difference = abs(float(found["logprob"]) - expected.logprob)
            self.worst_logprob = float(np.maximum(self.worst_logprob, difference))


@dataclass(frozen=True)
class _Case:
    """A row of logits to sample. index: its place among the logits; answer: the reference's."""

    index: int
    parameters: TopWParameters
    uniform: float
    answer: SampledRow
    rule: RuleParameters | None = None


def sampler_checks(
    probe: SamplerProbe,
    sampler: SamplerInfo,
    defaults: TopWParameters,
    geometry: Geometry,
    logits: np.ndarray,
    title: str = "sampler",
) -> Iterator[Check | NotCompared]:
    """Compare kept sets, tokens, certificates and log-probabilities.

    For each crop, compares its size and draws its tokens, six of a large one, each by the uniform number in the middle
    of its interval. Each row is compared again under a mask that forbids its best token. Rows on a tie, which rounding
    may decide (docs/contract/graph.md, section 4), are not judged.

    If fewer than FEWEST_ROWS, FEWEST_UNCERTIFIED or FEWEST_MASKED rows are left, constructed logits are added. If there
    are still too few, yields NotCompared.

    logits: float32 [n, vocab].
    title: prefix of the results' names.
    """
    unmasked, masked = _Tally(), _Tally()
    made = constructed_logits(sampler.vocab_size)
    unmasked.add_all(_answer_pairs(probe, sampler, defaults, geometry, logits))
    given = unmasked.rows
    if not unmasked.has_enough:
        unmasked.add_all(_answer_pairs(probe, sampler, defaults, geometry, made))
    masked.add_all(_answer_pairs(probe, sampler, defaults, geometry, logits, random_masks(logits)))
    if masked.compared < FEWEST_MASKED:
        masked.add_all(_answer_pairs(probe, sampler, defaults, geometry, made, random_masks(made)))
    wrong = {name: unmasked.wrong[name] + masked.wrong[name] for name in _ANSWERS}
    detail = (
        f"{unmasked.rows} rows, {unmasked.rows - given} of constructed logits, {unmasked.uncertified} without a "
        f"certificate, {unmasked.ties} on a tie; {masked.rows} rows under a mask, {masked.ties} on a tie"
    )
    if not (unmasked.has_enough and masked.compared >= FEWEST_MASKED) and not any(wrong.values()):
        least = f"{FEWEST_ROWS} rows without a tie, {FEWEST_UNCERTIFIED} without a certificate and {FEWEST_MASKED}"
        yield NotCompared(title, f"at least {least} under a mask are needed ({detail})")
        return
    for name, count in wrong.items():
        yield Check(f"{title} {name}", count == 0, float(count), 0.0, detail)
    worst = float(np.maximum(unmasked.worst_logprob, masked.worst_logprob))  # NaN if one is
    yield Check(f"{title} log-probabilities", worst <= LOGPROB_BOUND, worst, LOGPROB_BOUND, detail)


def constructed_logits(vocab: int) -> np.ndarray:
    """Logits [_CONSTRUCTED_ROWS, vocab] without ties, for which distances decide.

    In each row, up to 8 tokens have the largest logits, evenly spaced over a range of 0.5 to 2. All others are at least
    4 lower.
    """
    generator = np.random.default_rng(1)
    rows = np.empty((_CONSTRUCTED_ROWS, vocab), np.float32)
    head = min(8, vocab)
    below = -4.0 - 8.0 * np.linspace(0.0, 1.0, vocab - head)
    for row, spread in zip(rows, np.linspace(0.5, 2.0, _CONSTRUCTED_ROWS), strict=True):
        row[generator.permutation(vocab)] = np.concatenate([-np.linspace(0.0, spread, head), below - spread])
    return rows


def random_masks(logits: np.ndarray) -> np.ndarray:
    """Masks int32 [n, words] for logits [n, vocab]: each allows a random half of the tokens, but not the row's best."""
    flags = np.random.default_rng(2).random(logits.shape) < 0.5
    flags[np.arange(len(logits)), logits.argmax(axis=1)] = False
    return pack_mask(flags)


def graph_geometry(folder: Path, options: TopWOptions, vocab: int) -> Geometry:
    """The reference's geometry of the exported embedding table, in float64."""
    if options.metric == "uniform":
        return Geometry.uniform()
    model = ir.load(folder / MODEL_NAME)
    return Geometry.from_embeddings(EmbeddingTable(find_embedding(model.graph), vocab), options.metric)


def _settings(sampler: SamplerInfo) -> tuple[dict[str, float], ...]:
    """Changes of the default parameters: none, four under which distances decide, a higher Ts, and greedy.

    Distances change a crop only if they are about as large as differences of scores, about 1. `mahalanobis` distances
    are near sqrt(2 hidden), so geom_scale is divided by that.
    """
    one = (2.0 * (sampler.hidden_size or 1)) ** -0.5 if sampler.options.metric == "mahalanobis" else 1.0
    return (
        {},
        {"lam": 0.5, "beta": 1.0, "temperature": 1.0, "init_top_p": 0.3, "geom_scale": 0.5 * one},
        {"lam": 1.0, "beta": 3.0, "temperature": 1.0, "init_top_p": 0.3, "geom_scale": 0.25 * one},
        {"lam": 1.0, "beta": 3.0, "temperature": 1.3, "init_top_p": 0.1, "geom_scale": one},
        {"lam": 1.8, "beta": 3.2, "temperature": 1.5, "init_top_p": 0.4, "geom_scale": -0.1 * one},
        {"temperature": 0.7, "selection_temperature": 1.3},
        {"temperature": 0.0},
    )


def _answer_pairs(
    probe: SamplerProbe,
    sampler: SamplerInfo,
    defaults: TopWParameters,
    geometry: Geometry,
    logits: np.ndarray,
    masks: np.ndarray | None = None,
) -> Iterator[tuple[SampledRow, dict[str, np.ndarray]]]:
    """Yield the answers of the reference and the graph for each case, in pairs.

    masks: int32 [n, words], one for each row of `logits`; only the first _MASKED_SETTINGS are then compared.
    """
    cases = []
    for setting in _settings(sampler)[: None if masks is None else _MASKED_SETTINGS]:
        parameters = TopWParameters(**{**asdict(defaults), **setting})
        for index, row in enumerate(logits):
            allowed = None if masks is None else masks[index]
            first = sample_row(row, parameters, sampler.options, geometry, 0.5, allowed=allowed)
            for uniform in _interval_middles(row, first, parameters):
                cases.append(_Case(index, parameters, uniform, _redraw(first, row, parameters, uniform)))
    row_values = min(sampler.options.top_m, sampler.vocab_size) * (sampler.hidden_size or 1)
    yield from _run_cases(probe, cases, logits, masks, max(1, min(_LARGEST_BATCH, _POOL_VALUES // row_values)))


def _run_cases(
    probe: SamplerProbe, cases: list[_Case], logits: np.ndarray, masks: np.ndarray | None, batch: int
) -> Iterator[tuple[SampledRow, dict[str, np.ndarray]]]:
    """Yield the answers of the reference and the graph for each case, in pairs. Runs `batch` rows at once."""
    for start in range(0, len(cases), batch):
        part = cases[start : start + batch]
        rows = [case.index for case in part]
        rules = [case.rule for case in part if case.rule is not None]
        results = probe.run(
            logits[rows],
            [asdict(case.parameters) for case in part],
            [case.uniform for case in part],
            None if masks is None else masks[rows],
            rules or None,
        )
        for number, case in enumerate(part):
            yield case.answer, {name: value[number] for name, value in results.items()}


def _redraw(row: SampledRow, logits: np.ndarray, parameters: TopWParameters, uniform: float) -> SampledRow:
    """The same crop with the draw of another uniform number."""
    if parameters.greedy or not row.is_valid:
        return row
    drawn = draw(logits, row.kept_ids, float(np.float32(parameters.temperature)), float(np.float32(uniform)))
    return replace(row, next_token=drawn.token, logprob=drawn.logprob, draw_margin=drawn.margin)


def _interval_middles(logits: np.ndarray, row: SampledRow, parameters: TopWParameters) -> list[float]:
    """Uniform numbers that draw tokens of the crop, each the middle of a token's interval; at most _TOKENS_PER_CROP."""
    if parameters.greedy or not row.is_valid:
        return [0.5]
    kept = logits[row.kept_ids].astype(np.float64)
    edges = np.concatenate([[0.0], np.cumsum(np.exp((kept - kept[0]) / parameters.temperature))])
    middles = (edges[:-1] + edges[1:]) / 2 / edges[-1]
    wide = np.diff(edges) / edges[-1] > 1e-5  # rounding may draw another token in narrower ones
    middles = middles[wide]
    if len(middles) == 0:
        return [0.5]
    chosen = np.unique(np.linspace(0, len(middles) - 1, _TOKENS_PER_CROP).astype(int))
    return [float(middles[i]) for i in chosen]


def check_bound(folder: Path, geometry: Geometry, tokens: int) -> Check:
    """Check the stored neighbour bound of some tokens against distances in float64.

    The difference of the check is the largest bound minus distance, which must not be positive.

    geometry: the reference's.
    tokens: the number of tokens.
    """
    bound = stored_bound(folder)
    name = "neighbour bound"
    if bound.shape != (tokens,):
        return Check(name, False, float("inf"), 0.0, f"it has the shape {bound.shape}, not ({tokens},)")
    chosen = np.random.default_rng(0).permutation(tokens)[:_TOKENS_MEASURED]
    nearest = geometry.nearest_distances(chosen, tokens)
    difference = float(np.max(bound[chosen] - nearest))
    share = np.mean(bound[chosen] / np.maximum(nearest, np.finfo(np.float32).tiny))
    detail = f"{len(chosen)} of {tokens} tokens, the bound is {share:.2%} of the distance"
    return Check(name, difference <= 0.0, difference, 0.0, detail)


def stored_bound(folder: Path) -> np.ndarray:
    """The export's neighbour bound, input 16 of the sampler node: float32 [tokens] or [0]."""
    model = ir.load(folder / MODEL_NAME)
    bound = sampler_node(model.graph).inputs[len(SAMPLER_INPUTS) + GEOMETRY_INPUTS.index("neighbour_bound")]
    return np.array(stored_array(constant_of(required_node_input(bound))))


RULES = (
    RuleParameters(top_k=20),
    RuleParameters(top_p=0.9),
    RuleParameters(min_p=0.05),
    RuleParameters(rule="top_h"),
    RuleParameters(typical_p=0.9),
    RuleParameters(eta_cutoff=0.02),
    RuleParameters(rule="top_n_sigma"),
    RuleParameters(rule="none"),
)
# Fewest rows without a tie: half of the rows that four rows of logits give for a single rule.
FEWEST_RULE_ROWS = 4
_RULE_TEMPERATURES = (1.0, 1.7)
_UNIFORM = (0.1, 0.5, 0.9)


def rule_checks(
    probe: SamplerProbe,
    defaults: TopWParameters,
    logits: np.ndarray,
    title: str = "sampler",
    names: Collection[str] | None = None,
) -> Iterator[Check | NotCompared]:
    """Compare sizes of kept sets, certificates, tokens and log-probabilities, in batches of all rules.

    Each rule draws once at each of two temperatures, by one of three uniform numbers. Rows on a tie, which rounding may
    decide (docs/contract/rules.md, section 2), are not compared. Yields NotCompared if fewer than FEWEST_RULE_ROWS
    other rows are left.

    logits: float32 [n, vocab].
    title: prefix of the results' names.
    names: the rules that the sampler carries; None for all. Yields nothing if none of them is in RULES.
    """
    carried = [rule for rule in RULES if names is None or rule.chosen.name in names]
    if not carried:
        return
    settings = [
        (index, rule, replace(defaults, temperature=temperature))
        for index in range(len(logits))
        for rule in carried
        for temperature in _RULE_TEMPERATURES
    ]
    cases = [
        _Case(index, parameters, uniform, _rule_answer(logits[index], parameters, uniform, rule), rule)
        for (index, rule, parameters), uniform in zip(settings, cycle(_UNIFORM), strict=False)
    ]
    tally = _Tally(needs_certificates=True)
    tally.add_all(_run_cases(probe, cases, logits, None, len(cases) // len(logits)))
    wrong = sum(tally.wrong.values())
    detail = f"{tally.rows} rows, {len(carried)} rules, {tally.ties} on a tie"
    if tally.compared < FEWEST_RULE_ROWS and not wrong:
        yield NotCompared(f"{title} rules", f"at least {FEWEST_RULE_ROWS} rows without a tie are needed ({detail})")
        return
    yield Check(f"{title} rules", wrong == 0, float(wrong), 0.0, detail)
    worst = tally.worst_logprob
    yield Check(f"{title} rules' log-probabilities", worst <= LOGPROB_BOUND, worst, LOGPROB_BOUND, detail)


def _rule_answer(row: np.ndarray, parameters: TopWParameters, uniform: float, rule: RuleParameters) -> SampledRow:
    return sample_row(row, parameters, uniform=uniform, rule=rule.code, rule_values=rule.values)

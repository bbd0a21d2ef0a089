"""Generate like `topw generate`, then recompute every step's logits, and compare each kept set with the one without
distances.

The exported graph has no logits output, so the part of the graph before the sampler runs again on the generated tokens,
with the same cache and padding. Each kept set is compared with the size and certificate that the first run reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from topw_deploy.errors import ManifestError, ParameterError, PromptError
from topw_deploy.export.embedding import EmbeddingTable, find_embedding, stored_array
from topw_deploy.export.sampler.attach import sampler_node
from topw_deploy.export.sampler.spec import GEOMETRY_INPUTS, SAMPLER_INPUTS
from topw_deploy.export.verification.reference import LogitsProbe
from topw_deploy.manifest import MODEL_NAME, DecoderManifest
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.inputs import EditInputs
from topw_deploy.runtime.parameters import read_values
from topw_deploy.runtime.sequence import Sequence as Prepared
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import ALIASES, GREEDY_BELOW, PARAMETER_NAMES, depends_on_temperature, unknown_name
from topw_deploy.sampling.reference import Crop
from topw_deploy.sampling.rules import RULE_OF_VALUE, TOP_W, RuleCrop, RuleParameters, kept_set
from topw_deploy.text import count_text
from topw_lab.stats.exact import ExactAnalyser, ExactStep, evenly_spaced_steps, require_objective

Floats = NDArray[np.float64]

_SWEPT = (*PARAMETER_NAMES, *RULE_OF_VALUE)


@dataclass(frozen=True, slots=True)
class Setting:
    """The sampling parameters of one run.

    label: names and values of the parameters that differ between settings.
    parameters: parameters of Top-W, the sampling rule, and parameters of that rule.
    """

    label: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExactRequest:
    """Which steps to analyse under the exact objective F.

    steps: maximum number of steps per setting; they are evenly spaced over the texts of the setting.
    pool: F is computed among this many likeliest tokens, at least the export's top_m. None: top_m.
    """

    steps: int
    pool: int | None = None


def settings_of(given: Mapping[str, Any], sweeps: Sequence[str]) -> list[Setting]:
    """Combine the parameters `given` with every combination of the swept values, one setting each.

    sweeps: texts such as "temperature=0.5,1,2".

    Raises ParameterError for a sweep of another form, or a name that is unknown, swept twice or in `given`.
    """
    columns: dict[str, list[Any]] = {}
    for text in sweeps:
        name, values = _parse_sweep(text)
        if name in columns:
            raise ParameterError(f"{name} is swept twice; give all its values in one --sweep.", name, "sweep")
        if name in given:
            raise ParameterError(f"{name} is given as an option and swept; remove one of them.", name, "sweep")
        columns[name] = values
    settings = []
    for combination in itertools.product(*columns.values()):
        swept = dict(zip(columns, combination, strict=True))
        label = ", ".join(f"{name} {_value_text(value)}" for name, value in swept.items())
        settings.append(Setting(label, {**given, **swept}))
    return settings


def _value_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _parse_sweep(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = ALIASES.get(name, name)
    if equals and name not in _SWEPT:
        raise ParameterError(str(unknown_name(name, _SWEPT)), "sweep")
    try:
        parsed = list(dict.fromkeys(_parse_value(name, value) for value in values.split(",")))
    except ValueError:
        raise ParameterError(
            f"the sweep {text!r} is not NAME=NUMBER,NUMBER,...; write for example temperature=0.5,1,2.", "sweep"
        ) from None
    for value in parsed:
        try:
            read_values({name: value})  # checks the range
        except ParameterError as error:
            raise ParameterError(str(error), "sweep") from None
    return name, parsed


def _parse_value(name: str, value: str) -> float | str:
    """`value` as a number, or as text if it is a `beta` that depends on the temperature, such as "1.5+1.5*T"."""
    try:
        return float(value)
    except ValueError:
        if name == "beta" and depends_on_temperature(value):
            return value.strip()
        raise


@dataclass(frozen=True, slots=True)
class StepAnalysis:
    """The kept set of one step. Under a rule other than Top-W, no distance is measured.

    kept: number of tokens in the set.
    mass: probability of the set under the softmax at the selection temperature.
    entropy: entropy of the whole softmax at the sampling temperature, in nats.
    kept_entropy: entropy of the renormalised set at the sampling temperature, in nats.
    added: tokens that are in the set only because of distances.
    dropped: tokens that are not in the set only because of distances.
    """

    kept: int
    certified: bool
    mass: float
    entropy: float
    kept_entropy: float
    added: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def is_changed(self) -> bool:
        """Whether distances changed the kept set."""
        return bool(self.added or self.dropped)


@dataclass(frozen=True)
class Analyser:
    """Recomputes a model's kept sets from its options and geometry, with the reference."""

    options: TopWOptions
    geometry: Geometry

    def analyse(
        self, logits: NDArray[np.float32], parameters: TopWParameters, rule: RuleParameters | None = None
    ) -> StepAnalysis:
        """Analyse edited logits [V] of one step.

        parameters: Top-W's, rounded to float32. The temperatures apply to every rule.
        rule: the sampling rule of the step; None for Top-W.
        """
        temperature, selection = parameters.temperature, parameters.selection_temperature
        found: Crop | RuleCrop
        if rule is not None and rule.chosen is not TOP_W:
            found = kept_set(logits, rule.chosen, rule.values, temperature=temperature, selection_temperature=selection)
            without = found.kept
        else:
            found = crop(logits, parameters, self.options, self.geometry)
            # A certified set is the same for every geom_scale >= 0 (docs/contract/theory.md, T2).
            without = found.kept
            if not found.certified:
                options = replace(self.options, metric="uniform", potential="nearest")
                without = crop(logits, replace(parameters, geom_scale=0.0), options).kept
        return StepAnalysis(
            certified=found.certified,
            kept=len(found.kept),
            mass=float(softmax(logits, selection or temperature)[found.kept].sum()),
            entropy=entropy(softmax(logits, temperature)),
            kept_entropy=entropy(softmax(logits[found.kept], temperature)),
            added=tuple(np.setdiff1d(found.kept, without).tolist()),
            dropped=tuple(np.setdiff1d(without, found.kept).tolist()),
        )


def softmax(logits: NDArray[np.float32], temperature: float) -> Floats:
    """Probabilities [V]. Below `GREEDY_BELOW`, the first largest logit has probability 1."""
    row = logits.astype(np.float64)
    if temperature < GREEDY_BELOW:
        return (np.arange(len(row)) == np.argmax(row)).astype(np.float64)
    w: Floats = np.exp((row - row.max()) / temperature)
    return w / w.sum()


def entropy(p: Floats) -> float:
    """Entropy of the probabilities `p` in nats. Probabilities of 0 are allowed."""
    positive = p[p > 0]
    return float(max(0.0, -(positive * np.log(positive)).sum()))


@dataclass
class AnalysedText:
    """A generated text and the analysis of its steps.

    request: the prompt with its parameters.
    steps: the analysed steps.
    agreed: number of steps whose kept set has the size and certificate that the graph reported.
    exact: the steps analysed under the exact objective, by position from 0.
    """

    request: Prepared
    result: GenerationResult
    steps: list[StepAnalysis] = field(default_factory=list)
    agreed: int = 0
    exact: dict[int, ExactStep] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectedRuns:
    """Result of `collect`.

    runs: each setting with its texts: all prompts in order with the first seed, then with the next seed, and so on.
    tokens: the text of each token that distances added or dropped, by token id.
    prompts: number of prompts.
    """

    runs: list[tuple[Setting, list[AnalysedText]]]
    tokens: dict[int, str]
    prompts: int


def collect(
    folder: Path,
    prompts: Sequence[tuple[str, str]],
    settings: Sequence[Setting],
    *,
    batch_size: int = 1,
    generation: Mapping[str, Any] | None = None,
    seeds: int = 1,
    exact: ExactRequest | None = None,
    progress: Progress = SILENT,
) -> CollectedRuns:
    """Generate from every prompt under every setting and analyse each step.

    folder: an exported model.
    prompts: (text, place of the prompt in its source, for error messages) of each.
    batch_size: prompts per batch; batching can change the last bits of logits.
    generation: further parameters of `TopWModel.generate`.
    seeds: number of texts per prompt; their seeds are consecutive and start with the seed in `generation`.
    exact: also analyse steps under the exact objective; needs the extra `exact`.

    Raises ManifestError for a folder without a decoder, PromptError for a prompt longer than the context,
    ParameterError for settings or a pool that the exact objective does not allow, and the errors of `TopWModel`.
    """
    exact_analyser = None
    with TopWModel.from_pretrained(folder) as model:
        manifest, tokenizer = model.manifest, model.tokenizer
        ids = [_prompt_ids(model, *prompt) for prompt in prompts]
        analyser = load_analyser(folder, manifest)
        first = {"seed": 0, **(generation or {})}
        by_setting = [
            [{**first, **setting.parameters, "seed": first["seed"] + offset} for offset in range(seeds)]
            for setting in settings
        ]
        # Prepare one prompt with all of them first: wrong parameters are refused before anything is generated.
        requests = [model.prepare(ids[:1], **each)[0] for by_seed in by_setting for each in by_seed]
        if exact is not None:
            pool = analyser.options.top_m if exact.pool is None else exact.pool
            exact_analyser = ExactAnalyser(analyser.options, analyser.geometry, pool)
            for request in requests:
                require_objective(request.params.top_w)
        what = f"{count_text(len(ids), 'prompt')} under {count_text(len(settings), 'setting')}"
        progress.say(f"Generating from {what}")
        with progress.bar(len(ids) * len(settings) * seeds, "prompts") as advance:
            generated = [
                [batch for each in by_seed for batch in _generate(model, ids, batch_size, each, advance)]
                for by_seed in by_setting
            ]
    progress.say("Analysing every step")
    probe = LogitsProbe(folder, manifest.decoder)
    runs = []
    total = sum(len(text.result.token_ids) for batches in generated for batch in batches for text in batch)
    with progress.bar(total, "tokens") as advance:
        for setting, batches in zip(settings, generated, strict=True):
            texts = [text for batch in batches for text in batch]
            lengths = [len(text.result.token_ids) for text in texts]
            chosen = iter(evenly_spaced_steps(lengths, 0 if exact is None else exact.steps))
            for batch in batches:
                places = list(itertools.islice(chosen, len(batch)))
                _analyse_batch(probe, analyser, batch, exact_analyser, places, advance)
            runs.append((setting, texts))
    steps = [step for _, texts in runs for text in texts for step in text.steps]
    moved = sorted({token for step in steps for token in (*step.added, *step.dropped)})
    return CollectedRuns(runs, {id: tokenizer.decode([id], skip_special_tokens=False) for id in moved}, len(ids))


def load_analyser(folder: Path, manifest: DecoderManifest) -> Analyser:
    """Load the embedding table and statistics of the sampler node in `folder`.

    Raises ManifestError if the node has no statistics.
    """
    sampler = manifest.sampler
    if sampler.options.metric == "uniform" or sampler.hidden_size is None:
        return Analyser(sampler.options, Geometry.uniform())
    graph = ir.load(folder / MODEL_NAME).graph
    inputs = sampler_node(graph).inputs[len(SAMPLER_INPUTS) :]
    statistics, table_inputs = inputs[: len(GEOMETRY_INPUTS)], inputs[len(GEOMETRY_INPUTS) :]
    mean, inverse_std = (_statistic_array(value) for value in statistics[:2])
    lookup = replace(find_embedding(graph), data=tuple(table_inputs), hidden=sampler.hidden_size)
    table: Any = EmbeddingTable(lookup, sampler.vocab_size)
    geometry = Geometry.from_embeddings(table, sampler.options.metric, (mean, inverse_std))
    return Analyser(sampler.options, geometry)


def _statistic_array(value: ir.Value | None) -> NDArray[np.float32]:
    if value is None or value.const_value is None:
        raise ManifestError("the sampler node has no stored statistics; export the model again.")
    return np.array(stored_array(value.const_value))


def _prompt_ids(model: TopWModel, text: str, where: str) -> list[int]:
    """Raises PromptError, naming the prompt, if it is not valid Unicode or fills the context."""
    context = model.manifest.decoder.context_length
    try:
        ids = model.encode(text)
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None
    if len(ids) >= context:
        raise PromptError(
            f"{where} has {len(ids)} tokens, but the model's context of {context} must hold it and a new one; shorten "
            "it."
        )
    return ids


def _generate(
    model: TopWModel, ids: Sequence[list[int]], batch_size: int, parameters: Mapping[str, Any], advance: Advance
) -> Iterator[list[AnalysedText]]:
    """Generate from all prompts. Yields the texts of each batch, not yet analysed."""
    for start in range(0, len(ids), batch_size):
        batch = ids[start : start + batch_size]
        results = model.generate(batch, **parameters)
        yield [AnalysedText(*pair) for pair in zip(model.prepare(batch, **parameters), results, strict=True)]
        advance(len(batch))


def _analyse_batch(
    probe: LogitsProbe,
    analyser: Analyser,
    batch: Sequence[AnalysedText],
    exact: ExactAnalyser | None,
    chosen: Sequence[set[int]],
    advance: Advance,
) -> None:
    """Analyse the texts of a batch. chosen: the positions of each text that `exact` also analyses."""
    edits = EditInputs(len(batch))
    for row, text in enumerate(batch):
        edits.set(row, text.request)
    for position, logits in enumerate(recomputed_logits(probe, batch)):
        for row, text in enumerate(batch):
            params, result = text.request.params, text.result
            if position >= len(result.token_ids):
                continue
            edited, parameters = edits.apply(row, logits[row]), as_float32(params.top_w)
            step = analyser.analyse(edited, parameters, params.rule)
            if exact is not None and position in chosen[row]:
                text.exact[position] = exact.analyse(edited, parameters, params.rule)
            edits.add_token(row, result.token_ids[position])
            text.agreed += (step.kept, step.certified) == (result.kept[position], result.certified[position])
            text.steps.append(step)
            advance(1)


def recomputed_logits(probe: LogitsProbe, batch: Sequence[AnalysedText]) -> Iterator[NDArray[np.float32]]:
    """Yield the logits [batch, vocab] of every step, before edits. The logits of finished rows are arbitrary."""
    lengths = [len(text.result.token_ids) for text in batch]
    width = max(len(text.request.prompt) for text in batch)
    ids, mask = (np.zeros((len(batch), width), np.int64) for _ in range(2))
    for row, text in enumerate(batch):
        start = width - len(text.request.prompt)
        ids[row, start:], mask[row, start:] = text.request.prompt, 1
    probe.start(len(batch))
    for position in range(max(lengths)):
        yield probe.step(ids, mask)
        alive = np.array([[position + 1 < length] for length in lengths])
        tokens = [
            text.result.token_ids[min(position, length - 1)] if length else 0
            for text, length in zip(batch, lengths, strict=True)
        ]
        ids = np.array(tokens, np.int64)[:, None]
        mask = np.concatenate([mask, alive.astype(np.int64)], axis=1)

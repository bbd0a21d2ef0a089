"""Compare the decoder's logits, and the tokens that the runtime generates, with the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.export.verification.reference import CacheDriver, Reference
from topw_deploy.export.verification.run import LEFT_PADDED, RIGHT_PADDED
from topw_deploy.manifest import Check, DecoderInfo, DecoderManifest, ModelFolder, NotCompared
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort.graph_session import GraphSession
from topw_deploy.runtime.session import SessionOptions
from topw_deploy.sampling import Geometry, SampledRow, TopWParameters, sample_row, uniform_for

# Type of the cache -> largest difference, relative to the largest logit or 1. Errors of float32 stay near 1e-6 over
# dozens of layers; float16 has 11 bits, and its errors grow with the number of layers.
BOUNDS = {"float": 1e-4, "float16": 1e-2}


def decoder_checks(
    probe: CacheDriver, reference: Reference, decoder: DecoderInfo, sequences: list[np.ndarray]
) -> Iterator[Check]:
    """Compare logits on `sequences`, token ids [n] each, longest first. Batches are padded on the sides that may be."""
    wanted = [reference.logits(ids) for ids in sequences]
    bound = BOUNDS[decoder.kv_dtype] * max(1.0, *(float(np.abs(rows).max()) for rows in wanted))
    ids, rows = sequences[0], wanted[0]

    def check(name: str, differences: list[float], detail: str) -> Check:
        worst = float(np.max(differences))  # NaN if one is, and the check then fails
        return Check(name, bool(worst <= bound), worst, bound, detail)

    yield check(
        "prefill logits", _run_differences(probe, ids, rows[-1:], [len(ids)]), f"{len(ids)} tokens, {reference.name}"
    )
    tail = min(4, len(ids) - 1)
    steps = [len(ids) - tail] + [1] * tail
    stepped = _run_differences(probe, ids, reference.logits_by_runs(ids, steps), steps)
    yield check("decode logits", stepped, f"{tail} steps after {len(ids) - tail} tokens")
    half, third = len(ids) // 2, len(ids) // 3
    chunks = [size for size in (half, third, len(ids) - half - third) if size]
    chunked = _run_differences(probe, ids, reference.logits_by_runs(ids, chunks), chunks)
    yield check("chunked prefill logits", chunked, f"chunks of {chunks}")
    lengths = [len(sequence) for sequence in sequences]
    if decoder.left_padding:
        yield check(LEFT_PADDED, _padded_differences(probe, sequences, wanted, left=True), f"lengths {lengths}")
    if decoder.right_padding:
        wanted = _logits_with_single_last_tokens(reference, sequences, wanted)
    if decoder.kv_form == "static" or decoder.right_padding:
        yield check(RIGHT_PADDED, _padded_differences(probe, sequences, wanted, left=False), f"lengths {lengths}")


def _run_differences(probe: CacheDriver, ids: np.ndarray, wanted: np.ndarray, runs: list[int]) -> list[float]:
    """Run `ids` in runs of these sizes. Returns the difference of each run's logits from its row of `wanted`."""
    probe.start(1)
    differences, end = [], 0
    for row, size in zip(wanted, runs, strict=True):
        start, end = end, end + size
        found = probe.step(ids[None, start:end], np.ones((1, end), np.int64))
        differences.append(_largest_difference(found[0], row))
    return differences


def _padded_differences(
    probe: CacheDriver, sequences: list[np.ndarray], wanted: list[np.ndarray], *, left: bool
) -> list[float]:
    """Run the sequences as a padded batch: all columns but the last two at once, then these one by one.

    wanted: the logits of each sequence, [n, vocab].
    left: whether the padding is on the left.

    Returns the difference for each row and run with a token.
    """
    length = max(len(ids) for ids in sequences)
    ids = np.zeros((len(sequences), length), np.int64)
    mask = np.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        place = slice(length - len(sequence), None) if left else slice(0, len(sequence))
        ids[row, place], mask[row, place] = sequence, 1
    probe.start(len(sequences))
    differences = []
    for start, end in ((0, length - 2), (length - 2, length - 1), (length - 1, length)):
        if start == end:
            continue
        found = probe.step(ids[:, start:end], mask[:, :end])
        for row, rows in enumerate(wanted):
            seen = int(mask[row, :end].sum())
            if mask[row, start:end].any():
                differences.append(_largest_difference(found[row], rows[seen - 1]))
    return differences


def _logits_with_single_last_tokens(
    reference: Reference, sequences: list[np.ndarray], wanted: list[np.ndarray]
) -> list[np.ndarray]:
    """The logits of `wanted`, computed with the last tokens of each sequence in runs of their own.

    The runs are those of `_padded_differences`, so that both sides round alike. NaN where nothing is compared.
    """
    first = max(len(ids) for ids in sequences) - 2
    logits = []
    for ids, rows in zip(sequences, wanted, strict=True):
        together = min(len(ids), first)
        runs = [run for run in (together - 1, min(together, 1)) if run > 0] + [1] * (len(ids) - together)
        logits.append(np.full_like(rows, np.nan))
        logits[-1][np.cumsum(runs) - 1] = reference.logits_by_runs(ids, runs)
    return logits


def _largest_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest absolute difference. That of equal infinities is 0; arrays of different shapes differ by infinity."""
    if found.shape != wanted.shape:
        return float("inf")
    same = np.isinf(wanted) & (found == wanted)
    return float(np.abs(np.where(same, 0.0, found - np.where(same, 0.0, wanted))).max())


TOKENS = 10  # generated after each prompt
SEED = 7
# Name -> changes of the default parameters. The second is far from greedy, so that geometry decides.
_SETTINGS: tuple[tuple[str, dict[str, float]], ...] = (
    ("defaults", {}),
    ("lam 0.5, temperature 1.5", {"lam": 0.5, "temperature": 1.5}),
)
_NO_EDITS: dict[str, Any] = {
    "ignore_eos": True,
    "min_new_tokens": 0,
    "stop_strings": (),
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "suppress_tokens": (),
    "bad_words_ids": (),
    "no_repeat_ngram_size": 0,
}


@dataclass(frozen=True)
class TokenAgreement:
    """Counts of compared tokens. Each token is compared after the same earlier tokens.

    equal: tokens that the reference draws too.
    near_ties: other tokens, that rounding of the logits may draw, so that they prove nothing.
    wrong: other tokens that rounding cannot draw, and missing ones.
    """

    equal: int
    near_ties: int
    wrong: int

    @property
    def tokens(self) -> int:
        """The number of tokens in all."""
        return self.equal + self.near_ties + self.wrong

    @property
    def is_conclusive(self) -> bool:
        """Whether a token is wrong or at least half of the tokens are equal."""
        return self.wrong > 0 or 2 * self.equal >= self.tokens > 0


def generation_checks(
    folder: Path, manifest: DecoderManifest, reference: Reference, geometry: Geometry, prompts: Sequence[np.ndarray]
) -> Iterator[Check | NotCompared]:
    """Generate tokens after a prompt under each setting, and compare them with the reference's.

    prompts: token ids [n] each. The next one is tried if the comparison after one is not conclusive.
    """
    opened = ModelFolder(folder, DecoderManifest, unfinished=True)
    context = manifest.decoder.context_length
    prompts = [prompt for prompt in prompts if len(prompt) < context]
    with TopWModel(opened, GraphSession(opened, SessionOptions(provider="cpu", sampler="graph")), 0.0) as model:
        for title, setting in _SETTINGS:
            name, best = f"generation ({title})", TokenAgreement(0, 0, 0)
            parameters = TopWParameters(**{**asdict(manifest.defaults), **setting})
            options = {**asdict(parameters), **_NO_EDITS, "seed": SEED}
            for prompt in prompts:
                count = min(TOKENS, context - len(prompt))
                tokens = model.generate(prompt.tolist(), max_new_tokens=count, **options).token_ids
                agreement = compare_tokens(tokens, count, manifest, reference, geometry, prompt, parameters)
                best = max(best, agreement, key=lambda found: found.equal)
                if agreement.is_conclusive:
                    ties = f", {agreement.near_ties} on a near-tie" if agreement.near_ties else ""
                    detail = f"{agreement.equal} of {agreement.tokens} tokens{ties}"
                    yield Check(name, agreement.wrong == 0, float(agreement.wrong), 0.0, detail)
                    break
            else:
                reason = f"{best.equal} of {best.tokens} tokens are equal, fewer than half: the others are near-ties"
                yield NotCompared(name, f"{reason}, on each of {len(prompts)} prompts")


def compare_tokens(
    tokens: list[int],
    wanted: int,
    manifest: DecoderManifest,
    reference: Reference,
    geometry: Geometry,
    prompt: np.ndarray,
    parameters: TopWParameters,
) -> TokenAgreement:
    """Compare generated tokens with the reference's draws after the same earlier tokens (teacher forcing).

    So a near-tie does not end the comparison.

    tokens: the generated ones.
    wanted: the number of tokens that should have been generated; missing ones are wrong.
    """
    error = BOUNDS[manifest.decoder.kv_dtype]
    sequence = np.concatenate([prompt, np.asarray(tokens, dtype=np.int64)])
    runs = [len(prompt)] + [1] * (len(tokens) - 1)
    rows = reference.logits_by_runs(sequence[:-1], runs) if tokens else ()
    equal = near_ties = 0
    for length, token, logits in zip(range(len(prompt), len(sequence)), tokens, rows, strict=True):
        uniform = uniform_for(SEED, length)
        row = sample_row(logits, parameters, manifest.sampler.options, geometry, uniform)
        if row.next_token == token:
            equal += 1
        else:
            near_ties += _is_near_tie(row, token, logits, parameters, uniform, error)
    return TokenAgreement(equal, near_ties, max(wanted, len(tokens)) - equal - near_ties)


def _is_near_tie(
    row: SampledRow, token: int, logits: np.ndarray, parameters: TopWParameters, uniform: float, error: float
) -> bool:
    """Whether logits [V] with this relative error may draw `token` in place of the reference's `row`.

    Rounding may change the crop of a row on a tie. Then any token may be drawn whose weight is at least error^2 of the
    largest. Without this limit, any token would pass where one has nearly all mass, because the objective is then
    nearly tied with that of every longer prefix.
    """
    apart = 2 * error * max(1.0, float(np.abs(logits[row.kept_ids]).max()))  # logits that rounding may swap
    if parameters.greedy:
        return bool(logits[token] >= logits.max() - apart)
    changes_crop = min(row.ties.objective, row.ties.nucleus) <= error or row.ties.pool_cut
    if changes_crop and (logits[token] - logits.max()) / parameters.temperature >= 2 * np.log(error):
        return True
    return token in row.kept_ids and _may_be_drawn(row, token, logits, parameters.temperature, uniform, apart, error)


def _may_be_drawn(
    row: SampledRow, token: int, logits: np.ndarray, temperature: float, uniform: float, apart: float, error: float
) -> bool:
    """Whether rounded logits may draw `token` from the unchanged crop.

    The draw orders tokens by logit. Tokens whose logit is larger by more than `apart` certainly come before `token`;
    those within `apart` of it may come before or after. The ends of the token's interval in the cumulative mass are
    exact to `error` times the crop's mass.
    """
    kept = logits[row.kept_ids].astype(np.float64)
    mass = np.exp((kept - kept.max()) / temperature)
    place = uniform * mass.sum()
    start = mass[kept > logits[token] + apart].sum()
    end = mass[kept >= logits[token] - apart].sum()
    slack = error * mass.sum()
    return bool(start - slack <= place <= end + slack)

"""Compare the decoder's logits with the reference's: in prefill, decode, chunked prefill and padded batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from topw_deploy.export.verification.probe import LogitsProbe
from topw_deploy.export.verification.reference import Reference
from topw_deploy.export.verification.results import LEFT_PADDED, RIGHT_PADDED
from topw_deploy.manifest import Check, DecoderInfo

# Type of the cache -> largest difference, relative to the largest logit or 1. Errors of float32 stay near 1e-6 over
# dozens of layers; float16 has 11 bits, and its errors grow with the number of layers.
BOUNDS = {"float": 1e-4, "float16": 1e-2}


def decoder_checks(
    probe: LogitsProbe, reference: Reference, decoder: DecoderInfo, sequences: list[np.ndarray]
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
    chunks = _chunk_sizes(len(ids))
    chunked = _run_differences(probe, ids, reference.logits_by_runs(ids, chunks), chunks)
    yield check("chunked prefill logits", chunked, f"chunks of {chunks}")
    lengths = [len(sequence) for sequence in sequences]
    if decoder.left_padding:
        yield check(LEFT_PADDED, _padded_differences(probe, sequences, wanted, left=True), f"lengths {lengths}")
    if decoder.right_padding:
        wanted = _logits_with_single_last_tokens(reference, sequences, wanted)
    if decoder.kv_form == "static" or decoder.right_padding:
        yield check(RIGHT_PADDED, _padded_differences(probe, sequences, wanted, left=False), f"lengths {lengths}")


def _chunk_sizes(length: int) -> list[int]:
    """Three sizes, with the sum `length`, of which none is 0."""
    first, second = length // 2, length // 3
    return [size for size in (first, second, length - first - second) if size]


def _run_differences(probe: LogitsProbe, ids: np.ndarray, wanted: np.ndarray, runs: list[int]) -> list[float]:
    """Run `ids` in runs of these sizes. Returns the difference of each run's logits from its row of `wanted`."""
    probe.start(1)
    differences, end = [], 0
    for row, size in zip(wanted, runs, strict=True):
        start, end = end, end + size
        found = probe.step(ids[None, start:end], np.ones((1, end), np.int64))
        differences.append(_largest_difference(found[0], row))
    return differences


def _padded_differences(
    probe: LogitsProbe, sequences: list[np.ndarray], wanted: list[np.ndarray], *, left: bool
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

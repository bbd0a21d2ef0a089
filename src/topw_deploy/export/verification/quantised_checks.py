"""Measure what quantisation loses on text, by comparing the exported graph with the float32 model.

The checks of decoder_checks.py have the same rounded weights on both sides. So these are the only checks that poor
rounding fails, and only for trained models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.verification.probe import LogitsProbe
from topw_deploy.export.verification.reference import Reference
from topw_deploy.manifest import Check, DecoderManifest, Note
from topw_deploy.sampling import Geometry, sample_row, uniform_for

# Largest increase of the loss in nats per token. For int4 it is five times that of rounding the bundled model to
# nearest in blocks of 256 (0.040). For comparison, scales a fifth too large in one layer cost 0.3, swapped half
# bytes in one matrix 0.13 to 1.1, and correct 8-bit weights at most 0.002.
PERPLEXITY_BOUNDS = {"int4": 0.2, "int8": 0.02}
# The same for models that are no better than guessing. Rounding changes their loss in either direction, by up to 0.6 in
# random models at 4 bits. So a smaller increase proves nothing; a larger one fails.
UNTRAINED_BOUND = 1.0
_CERTAINTY = 2.0  # the number of standard errors by which a loss must exceed its bound to fail
_BATCH = 16  # rows in a batch
_CROPS = 32  # positions at which kept sets and tokens are compared
_SEED = 11


@dataclass(frozen=True)
class EvaluationText:
    """A text on which a loss is measured.

    rows: token ids, int64 [rows, columns].
    prefix: the number of special tokens (BOS) at the start of each row.
    name: describes the text in results.
    """

    rows: np.ndarray
    prefix: int
    name: str


@dataclass(frozen=True)
class Loss:
    """The loss of both models on a text, in nats per token.

    exact: of the float32 model.
    quantised: of the exported graph.
    error: the standard error of their difference.
    """

    exact: float
    quantised: float
    error: float

    @classmethod
    def of(cls, exact: np.ndarray, quantised: np.ndarray) -> Loss:
        """Average losses [rows, tokens]. The samples are rows, because the losses of neighbouring tokens correlate."""
        samples = (quantised - exact).mean(axis=1) if len(exact) > 1 else (quantised - exact)[0]
        error = samples.std(ddof=1) / math.sqrt(len(samples)) if len(samples) > 1 else 0.0
        return cls(float(exact.mean()), float(quantised.mean()), float(error))

    @property
    def difference(self) -> float:
        """The increase of the loss: the logarithm of the ratio of perplexities."""
        return self.quantised - self.exact


def quantised_checks(
    probe: LogitsProbe,
    reference: Reference,
    text: EvaluationText,
    manifest: DecoderManifest,
    geometries: tuple[Geometry, Geometry],
) -> Iterator[Check | Note]:
    """Compare perplexity, kept sets and tokens of the exported graph with those of the float32 model.

    probe: the exported graph, with its own products.
    reference: the float32 model.
    geometries: of the graph's table and of the float32 model's.

    Yields the perplexity, which can fail, and then two notes.
    """
    counted = text.rows.shape[1] - 1
    places = {divmod(int(place), counted) for place in np.linspace(0, len(text.rows) * counted - 1, _CROPS)}
    exact, quantised, agreements = [], [], []
    for start in range(0, len(text.rows), _BATCH):
        rows = text.rows[start : start + _BATCH]
        here = {(row - start, column) for row, column in places if start <= row < start + len(rows)}
        losses, float_logits = _float_losses(reference, rows, here)
        exact.append(losses)
        losses = np.empty_like(losses)
        probe.start(len(rows))
        for column in range(counted):
            logits = probe.step(rows[:, column : column + 1], np.ones((len(rows), column + 1), np.int64))
            losses[:, column] = _losses(logits, rows[:, column + 1])
            for row in [row for row, place in here if place == column]:
                pair = logits[row], float_logits[row, column]
                agreements.append(_agreement(*pair, (start + row) * counted + column, manifest, geometries))
        quantised.append(losses)
    loss = Loss.of(*(np.concatenate(part)[:, max(0, text.prefix - 1) :] for part in (exact, quantised)))
    yield perplexity_check(loss, manifest, text)
    for what, same in zip(("kept sets", "tokens"), np.sum(agreements, axis=0), strict=True):
        yield Note(f"{what} compared with float32", f"{same} of {len(agreements)} equal under the defaults")


def perplexity_check(loss: Loss, manifest: DecoderManifest, text: EvaluationText) -> Check | Note:
    """Check that the loss grew by at most the bound, within its statistical error.

    A model that is no better than guessing does not pass: it fails, or gets a Note.
    """
    trained = loss.exact < math.log(manifest.sampler.vocab_size)
    bound = PERPLEXITY_BOUNDS[manifest.decoder.weights_dtype] if trained else UNTRAINED_BOUND
    name = "perplexity, log of the ratio"
    passed = bool(loss.difference - _CERTAINTY * loss.error <= bound)
    tokens = len(text.rows) * (text.rows.shape[1] - max(1, text.prefix))
    detail = (
        f"standard error {loss.error:.1g}; {np.exp(loss.quantised):.4g}, in float32 {np.exp(loss.exact):.4g}; "
        f"{tokens} tokens of {text.name}"
    )
    if passed and not trained:
        return Note(name, f"{loss.difference:.2g}, of a model that does no better than guessing; {detail}")
    return Check(name, passed, loss.difference, bound, detail)


def _float_losses(
    reference: Reference, rows: np.ndarray, places: set[tuple[int, int]]
) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """The float32 model's losses [rows, columns - 1], and its logits at the places (row, column)."""
    losses = np.empty((len(rows), rows.shape[1] - 1))
    kept: dict[tuple[int, int], np.ndarray] = {}
    for number, row in enumerate(rows):
        logits = reference.logits(row)
        for column in range(len(row) - 1):
            losses[number, column] = _losses(logits[None, column], row[None, column + 1])[0]
        kept |= {place: logits[place[1]].copy() for place in places if place[0] == number}
    return losses, kept


def _losses(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """-log p of each token, in nats: float64 [n]. logits: [n, vocab]; tokens: ids [n]."""
    wide = logits.astype(np.float64)
    most = wide.max(axis=1)
    chosen = wide[np.arange(len(tokens)), tokens]
    return np.asarray(np.log(np.exp(wide - most[:, None]).sum(axis=1)) + most - chosen)


def _agreement(
    logits: np.ndarray,
    float_logits: np.ndarray,
    place: int,
    manifest: DecoderManifest,
    geometries: tuple[Geometry, Geometry],
) -> tuple[bool, bool]:
    """Whether both models keep the same set, and draw the same token, under the defaults. place: seeds the draw."""
    uniform = uniform_for(_SEED, place)
    rows = [
        sample_row(row, manifest.defaults, manifest.sampler.options, geometry, uniform)
        for row, geometry in zip((logits, float_logits), geometries, strict=True)
    ]
    same_set = np.array_equal(np.sort(rows[0].kept_ids), np.sort(rows[1].kept_ids))
    return same_set, rows[0].next_token == rows[1].next_token

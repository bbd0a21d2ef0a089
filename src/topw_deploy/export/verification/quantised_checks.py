"""What quantisation cost: the graph as it is shipped beside the model in float32, on text, token by token.

Rounding weights changes a model, so nothing here proves an export wrong but its bound; the tight comparison is that of
decoder_checks with the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.verification.probe import LogitsProbe
from topw_deploy.manifest import Check, Manifest
from topw_deploy.sampling import Geometry, sample_row, uniform_for

# Nats per token that the text may become less probable by. Models in use lose under 0.2 at 4 bits and 0.01 at 8;
# random ones, whose logits rounding changes by a third of their spread, up to 0.6.
PERPLEXITY_BOUNDS = {"int4": 1.0, "int8": 0.1}
TOKENS = 256  # of text
_CROPS = 32  # positions at which crop and token are compared
_SEED = 11


@dataclass(frozen=True)
class Text:
    """Token ids to measure on, and what they are."""

    ids: np.ndarray
    name: str


def quantised_checks(
    probe: LogitsProbe, float_logits: np.ndarray, text: Text, manifest: Manifest, geometries: tuple[Geometry, Geometry]
) -> Iterator[Check]:
    """Perplexity, kept sets and drawn tokens of `probe`, the graph as shipped, beside the model in float32.

    float_logits: [n, vocab], the float model's answers to text.ids [n]. geometries: over the graph's table, over the
    float model's.
    """
    assert manifest.decoder is not None
    ids, places = text.ids, {int(place) for place in np.linspace(0, len(text.ids) - 1, _CROPS)}
    losses, float_losses, kept, tokens = [], [], 0, 0
    probe.start(1)
    for place in range(len(ids)):
        logits = probe.step(ids[None, place : place + 1], np.ones((1, place + 1), np.int64))[0]
        if place + 1 < len(ids):
            losses.append(_loss(logits, ids[place + 1]))
            float_losses.append(_loss(float_logits[place], ids[place + 1]))
        if place in places:
            same_set, same_token = _agreement(logits, float_logits[place], place, manifest, geometries)
            kept, tokens = kept + same_set, tokens + same_token
    loss, float_loss = float(np.mean(losses)), float(np.mean(float_losses))
    bound = PERPLEXITY_BOUNDS[manifest.decoder.weights_dtype]
    perplexities = f"{np.exp(loss):.4g}, in float32 {np.exp(float_loss):.4g}"
    yield Check(
        "perplexity, log of the ratio",
        bool(loss - float_loss <= bound),
        loss - float_loss,
        bound,
        f"{perplexities}; {len(losses)} tokens of {text.name}",
    )
    for name, same in (("kept sets unlike float32's", kept), ("tokens unlike float32's", tokens)):
        share = 1.0 - same / len(places)
        yield Check(name, True, share, 1.0, f"{same} of {len(places)} equal under the defaults; for information")


def _loss(logits: np.ndarray, token: int) -> float:
    """-log p(token) in nats."""
    wide = logits.astype(np.float64)
    return float(np.log(np.exp(wide - wide.max()).sum()) + wide.max() - wide[token])


def _agreement(
    logits: np.ndarray, float_logits: np.ndarray, place: int, manifest: Manifest, geometries: tuple[Geometry, Geometry]
) -> tuple[bool, bool]:
    uniform = uniform_for(_SEED, place)
    rows = [
        sample_row(row, manifest.defaults, manifest.sampler.options, geometry, uniform)
        for row, geometry in zip((logits, float_logits), geometries, strict=True)
    ]
    same_set = np.array_equal(np.sort(rows[0].kept_ids), np.sort(rows[1].kept_ids))
    return same_set, rows[0].next_token == rows[1].next_token

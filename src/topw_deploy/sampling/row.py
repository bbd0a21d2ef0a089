"""One row from logits to token, with the graph's numbers (docs/contract/graph.md, sections 3 to 7).

A packed mask allows token `id` if bit `id % 32` of word `id // 32`, the least significant first, is 1: the layout of
llguidance, xgrammar and vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.geometry import Geometry, Ids
from topw_deploy.sampling.parameters import GREEDY_BELOW, TopWOptions, TopWParameters, as_float32
from topw_deploy.sampling.reference import Crop, Ties, crop
from topw_deploy.sampling.rules import RULES_BY_CODE, TOP_W, RuleCrop, kept_set

WORD_BITS = 32
ALL_ALLOWED = np.int32(-1)  # every bit of a word of a mask set
_LITTLE_ENDIAN = np.dtype("<i4")
PADDING = -1  # an edit id without effect, because rows of a batch have different numbers of edits


@dataclass(frozen=True, slots=True)
class SampledRow:
    """The sampled token of one row: the graph's outputs, and values that only the reference computes.

    next_token: -1 if the row is invalid.
    logprob: the token's log probability in the renormalised crop at `temperature`; 0 if greedy or invalid.
    kept: the crop's size.
    mass: the crop's probability under the full softmax at the selection temperature.
    certified, kept_ids, ties: see `reference.Crop`.
    draw_margin: see `Draw`; inf without a draw.
    """

    next_token: int = -1
    logprob: float = 0.0
    kept: int = 0
    kept_ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    certified: bool = False
    mass: float = 0.0
    ties: Ties = field(default_factory=Ties)
    draw_margin: float = math.inf

    @property
    def is_valid(self) -> bool:
        return self.next_token >= 0


def sample_row(
    logits: ArrayLike,
    parameters: TopWParameters | Mapping[str, float],
    options: TopWOptions | None = None,
    geometry: Geometry | None = None,
    uniform: float = 0.0,
    edits: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    allowed: ArrayLike | None = None,
    rule: int = TOP_W.code,
    rule_values: Sequence[float] = (0.0, 0.0),
) -> SampledRow:
    """Edit, mask, crop and draw one row as the graph does, but in float64 from its float32 inputs.

    logits: [V], any float type, cast to float32.
    parameters: a mapping may hold values out of range.
    uniform: u in [0, 1), rounded to float32.
    edits: (ids, penalty, bias), see `apply_edits`.
    allowed: int32 [ceil(V / 32)], see `apply_mask`; None allows every token.
    rule: the sampling rule's code, and `rule_values` its (v0, v1), rounded to float32.

    Returns `SampledRow()` for an invalid row, because a graph cannot raise. A row is invalid if its edited and masked
    logits hold NaN, +inf or nothing finite, if a parameter, a value of the rule or u is out of range, and if the rule
    is unknown.

    Raises ParameterError for inputs that a graph cannot run: a wrong shape, edits out of range, a geometry of another
    metric.
    """
    with np.errstate(over="ignore"):
        row = np.asarray(logits).astype(np.float32)
    if edits is not None:
        row = apply_edits(row, *edits)
    if allowed is not None:
        row = apply_mask(row, allowed)
    u = float(np.float32(uniform))
    try:
        rounded = as_float32(parameters)
    except ParameterError:
        return SampledRow()
    with np.errstate(over="ignore"):
        values = np.asarray(rule_values, dtype=np.float32).tolist()
    known = RULES_BY_CODE.get(rule)
    if not np.isfinite(row.max()) or not 0 <= u < 1 or known is None or not known.accepts(values):
        return SampledRow()
    chosen: Crop | RuleCrop
    if known is TOP_W:
        chosen = crop(row, rounded, options, geometry)
    else:
        temperatures = {name: getattr(rounded, name) for name in ("temperature", "selection_temperature")}
        chosen = kept_set(row, known, values, **temperatures)
    mass = crop_mass(row, chosen, rounded)
    if rounded.greedy:
        return SampledRow(int(chosen.kept[0]), 0.0, 1, chosen.kept, True, mass, chosen.ties)
    drawn = draw(row, chosen.kept, rounded.temperature, u)
    return SampledRow(
        drawn.token, drawn.logprob, len(chosen.kept), chosen.kept, chosen.certified, mass, chosen.ties, drawn.margin
    )


def crop_mass(logits: ArrayLike, chosen: Crop | RuleCrop, parameters: TopWParameters) -> float:
    """The crop's probability under the softmax of the row [V] at the selection temperature; 1 if greedy."""
    selection = parameters.selection_temperature or parameters.temperature
    if selection < GREEDY_BELOW:
        return 1.0
    row = np.asarray(logits).astype(np.float64)
    w = np.exp((row - row.max()) / selection)
    return float(w[chosen.kept].sum() / w.sum())


def apply_edits(logits: ArrayLike, ids: ArrayLike, penalty: ArrayLike, bias: ArrayLike) -> NDArray[np.float32]:
    """Apply penalties, biases and bans to logits [V], in float32 and the graph's order of operations.

    ids: [N] int64, distinct; -1 is padding.
    penalty: [N] > 0. A logit l becomes l / penalty if l > 0, else l * penalty (Keskar et al. 2019, as in transformers).
    bias: [N], added afterwards; -inf bans.

    Returns a new float32 [V]. A penalty that is not > 0 makes its logit NaN and the row invalid. Raises ParameterError
    for an id out of range or repeated.
    """
    edited = np.array(logits, dtype=np.float32)
    i = np.asarray(ids, dtype=np.int64)
    divide = np.asarray(penalty, dtype=np.float32)
    add = np.asarray(bias, dtype=np.float32)
    if not i.ndim == divide.ndim == add.ndim == 1 or not len(i) == len(divide) == len(add):
        raise ParameterError(f"edits have shapes {i.shape}, {divide.shape}, {add.shape}, but must be [N] each.")
    divide = np.where(divide > 0, divide, np.float32(np.nan))
    real = i != PADDING
    i, divide, add = i[real], divide[real], add[real]
    outside = i[(i < 0) | (i >= len(edited))]
    if len(outside):
        raise ParameterError(
            f"edit id {outside[0]} is not a token: it must be in 0..{len(edited) - 1}, or -1 for padding."
        )
    if len(np.unique(i)) < len(i):
        raise ParameterError("a token is edited twice in one row; combine its edits into one.")
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities invalidate the row later
        old = edited[i]
        edited[i] = np.where(old > 0, old / divide, old * divide) + add
    return edited


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token.

    token: its id.
    logprob: log of its probability in the renormalised crop.
    margin: distance of u G_K from the nearest other token's interval, relative to G_K (see `draw`).
    """

    token: int
    logprob: float
    margin: float


def draw(logits: ArrayLike, kept: ArrayLike, temperature: float, uniform: float) -> Draw:
    """Draw one token of a crop (docs/contract/graph.md, section 5).

    logits: the row [V].
    kept: the crop's ids [K], by (logit descending, id ascending).
    temperature: T > 0 of the weights w_i = exp((l_i - l_max) / T), l_max the largest kept logit.
    uniform: u in [0, 1).

    With G the inclusive sums of w, draws the first token with G_i > u G_K; the margin is the smallest |G_i - u G_K| /
    G_K over i < K. Raises ParameterError for an empty crop and a temperature or uniform out of range.
    """
    ids = np.asarray(kept, dtype=np.int64)
    if len(ids) == 0:
        raise ParameterError("the crop is empty, but must hold at least one token to draw from.")
    if not temperature > 0:
        raise ParameterError(f"temperature is {temperature!r}, but must be > 0 to draw; a greedy row takes its argmax.")
    if not 0 <= uniform < 1:
        raise ParameterError(f"uniform is {uniform!r}, but must be in [0, 1).")
    chosen = np.asarray(logits)[ids].astype(np.float64)
    a = (chosen - chosen[0]) / temperature  # [K]
    G = np.cumsum(np.exp(a))
    distances = G - uniform * G[-1]
    i = min(int(np.argmax(distances > 0)), len(ids) - 1)
    margin = float(np.abs(distances[:-1]).min() / G[-1]) if len(ids) > 1 else math.inf
    return Draw(int(ids[i]), float(a[i] - np.log(G[-1])), margin)


def mask_words(vocab: int) -> int:
    """The number of words in one row's mask: ceil(vocab / 32)."""
    return -(-vocab // WORD_BITS)


def pack_mask(allowed: ArrayLike) -> NDArray[np.int32]:
    """Pack flags bool [..., V] into words int32 [..., ceil(V / 32)]; the bits beyond V are 0.

    Raises ParameterError for another type or for a scalar.
    """
    flags = np.asarray(allowed)
    if flags.dtype != np.bool_ or flags.ndim == 0:
        raise ParameterError(f"the mask is {flags.dtype} {list(flags.shape)}, but must be bool [..., vocab].")
    vocab = flags.shape[-1]
    octets = np.zeros((*flags.shape[:-1], mask_words(vocab) * 4), np.uint8)
    octets[..., : -(-vocab // 8)] = np.packbits(flags, axis=-1, bitorder="little")
    return octets.view(_LITTLE_ENDIAN).astype(np.int32, copy=False)


def unpack_mask(words: ArrayLike, vocab: int) -> NDArray[np.bool_]:
    """Unpack words int32 [..., ceil(V / 32)] into flags bool [..., vocab].

    Raises ParameterError for another type or width.
    """
    given = np.asarray(words)
    if given.dtype != np.int32 or given.ndim == 0 or given.shape[-1] != mask_words(vocab):
        raise ParameterError(
            f"the mask is {given.dtype} {list(given.shape)}, but must be int32 [..., {mask_words(vocab)}] for "
            f"{vocab} tokens."
        )
    octets = np.ascontiguousarray(given, _LITTLE_ENDIAN).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab, bitorder="little").view(np.bool_)


def apply_mask(logits: ArrayLike, words: ArrayLike) -> NDArray[np.float32]:
    """Set the logits [..., V] of tokens that `words` [..., ceil(V / 32)] does not allow to -inf. Returns float32.

    Raises the errors of `unpack_mask`.
    """
    row = np.asarray(logits, dtype=np.float32)
    return np.where(unpack_mask(words, row.shape[-1]), row, np.float32(-np.inf))

"""The node's inputs: parameter columns, and edited and masked logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.sampling.mask import WORD_BITS, mask_words
from topw_deploy.sampling.parameters import GREEDY_BELOW

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

# Closed intervals of allowed values, in the order of `Rows.given`; none contains NaN.
_INTERVALS = {
    "temperature": (0.0, LARGEST),
    "selection_temperature": (0.0, LARGEST),
    "lam": (0.0, LARGEST),
    "beta": (0.0, LARGEST),
    "init_top_p": (SMALLEST, 1.0),
    "geom_scale": (-LARGEST, LARGEST),
    "uniform": (0.0, BELOW_ONE),
}
PARAMETERS = tuple(_INTERVALS)

Bounded = tuple[Tensor, float, float]
"""A column [batch, 1] with its lowest and highest allowed value."""

BLOCK = 128
"""Tokens per block of the candidate search: shorter blocks cost more maxima, longer ones more sorting."""


@dataclass(frozen=True)
class Rows:
    """Parameters as float32 columns [batch, 1].

    given: in the order of `PARAMETERS`.
    greedy: bool, temperature below 1e-5; `reward` is -1, `scale` 0.
    temperature, selection: T and Ts, never 0.
    lam, beta: weights of entropy and log mass.
    reward: beta - lam.
    warm_mass, scale: init_top_p, geom_scale.
    """

    given: tuple[Tensor, ...]
    greedy: Tensor
    temperature: Tensor
    selection: Tensor
    lam: Tensor
    beta: Tensor
    reward: Tensor
    warm_mass: Tensor
    scale: Tensor
    uniform: Tensor


@scope
def row_parameters(op: Ops, inputs: Sequence[Tensor]) -> Rows:
    axis = op.constant([1], np.int64)
    given = tuple(op.Unsqueeze(value, axis) for value in inputs)
    temperature, selection, lam, beta, warm_mass, scale, uniform = given
    zero = op.constant(0.0)
    greedy = op.Less(temperature, op.constant(GREEDY_BELOW))
    nonzero = op.Max(temperature, op.constant(GREEDY_BELOW))
    return Rows(
        given=given,
        greedy=greedy,
        temperature=nonzero,
        selection=op.Where(op.Equal(selection, zero), nonzero, selection),
        lam=lam,
        beta=beta,
        reward=op.Where(greedy, op.constant(-1.0), op.Sub(beta, lam)),
        warm_mass=warm_mass,
        scale=op.Where(greedy, zero, scale),
        uniform=uniform,
    )


@scope
def within(op: Ops, rows: Rows, further: Sequence[Bounded] = ()) -> Tensor:
    """Whether columns are in their intervals: bool [batch, 7 + further].

    All are compared at once, because each node of the graph costs time.
    """
    bounds = [*_INTERVALS.values(), *((low, high) for _, low, high in further)]
    columns = op.Concat(*rows.given, *(column for column, _, _ in further), axis=1)
    lowest = op.constant([low for low, _ in bounds])
    highest = op.constant([high for _, high in bounds])
    return op.And(op.GreaterOrEqual(columns, lowest), op.LessOrEqual(columns, highest))


@scope
def all_true(op: Ops, flags: Tensor, axis: int | None = None) -> Tensor:
    """Whether all `flags` are true, over everything or over one axis, which is kept."""
    numbers = op.Cast(flags, to=1)
    if axis is None:
        return op.Cast(op.ReduceMin(numbers, keepdims=0), to=9)
    return op.Cast(op.ReduceMin(numbers, op.constant([axis], np.int64), keepdims=1), to=9)


def padded_width(vocab_size: int) -> int:
    """The width of padded logits: whole blocks, with at least one padding column."""
    return (vocab_size // BLOCK + 1) * BLOCK


@scope
def apply_edits(op: Ops, logits: Tensor, ids: Tensor, penalty: Tensor, bias: Tensor, vocab_size: int) -> Tensor:
    """Edit logits [batch, vocab] and pad with -inf to [batch, padded] (docs/contract/graph.md, section 6).

    ids: int64 [batch, edits], distinct where >= 0.
    penalty, bias: float32 [batch, edits].

    A logit l becomes (l / penalty if l > 0 else l * penalty) + bias; NaN unless penalty > 0. Ids outside the vocabulary
    edit a padding column, which stays -inf. Padding makes a copy, so onnxruntime can scatter in place.
    """
    spare = op.constant(vocab_size, np.int64)
    nothing = op.constant(-np.inf)
    widths = op.constant([0, 0, 0, padded_width(vocab_size) - vocab_size], np.int64)
    wide = op.Pad(logits, widths, nothing)
    column = op.Min(op.Where(op.Less(ids, op.constant(0, np.int64)), spare, ids), spare)
    zero = op.constant(0.0)
    old = op.GatherElements(wide, column, axis=1)
    scaled = op.Where(op.Greater(old, zero), op.Div(old, penalty), op.Mul(old, penalty))
    new = op.Where(op.Greater(penalty, zero), op.Add(scaled, bias), op.constant(np.nan))
    return op.ScatterElements(wide, column, new, axis=1)


@scope
def apply_mask(op: Ops, logits: Tensor, words: Tensor, vocab_size: int) -> Tensor:
    """Set tokens that are not allowed to -inf in padded logits [batch, padded] (docs/contract/graph.md, section 6).

    words: int32 [batch, ceil(vocab / 32)], or [batch, 0] to allow all.

    Without words, every tensor but the last two has no rows, and the cost is two copies of the logits. (ScatterND would
    need only one copy, but the forms for TensorRT avoid it.)
    """
    width, given = padded_width(vocab_size), mask_words(vocab_size)
    whole = op.Reshape(words, op.constant([-1, given], np.int64))  # [k, given], k = batch or 0
    # The padding is -inf, masked or not, so its words do not matter. (CUDA has no kernel for Pad with int32.)
    repeated = op.constant(np.minimum(np.arange(width // WORD_BITS), given - 1), np.int64)
    flags = allowed_tokens(op, op.Gather(whole, repeated, axis=1), width)
    zero = op.constant([0], np.int64)
    count = op.Shape(flags, start=0, end=1)
    masked = op.Where(flags, op.Slice(logits, zero, count, zero), op.constant(-np.inf))
    others = op.Slice(logits, count, op.constant([np.iinfo(np.int64).max], np.int64), zero)
    return op.Concat(masked, others, axis=0)


@scope
def allowed_tokens(op: Ops, words: Tensor, width: int) -> Tensor:
    """The bits of words int32 [k, width / 32], from the least significant: bool [k, width].

    The bits are looked up by octet, because NVIDIA's parser has no bitwise operators. Only the highest octet is signed.
    """
    halves = op.Reshape(low_and_high(op, words, 1 << 16), op.constant([-1, width // 16], np.int64))
    values = np.arange(-128, 256)
    table = op.constant(values[:, None] >> np.arange(8) & 1, np.bool_)
    octets = op.Add(low_and_high(op, halves, 1 << 8), op.constant(-values[0], np.int32))
    return op.Reshape(op.Gather(table, octets, axis=0), op.constant([-1, width], np.int64))


@scope
def low_and_high(op: Ops, values: Tensor, base: int) -> Tensor:
    """value = high * base + low with 0 <= low < base: int32 [k, n] -> [k, n, (low, high)]."""
    divisor, axis = op.constant(base, np.int32), op.constant([2], np.int64)
    low = op.Mod(values, divisor)
    high = op.Div(op.Sub(values, low), divisor)
    return op.Concat(op.Unsqueeze(low, axis), op.Unsqueeze(high, axis), axis=2)


@scope
def without_padding(op: Ops, logits: Tensor, vocab_size: int) -> Tensor:
    start, end = op.constant([0], np.int64), op.constant([vocab_size], np.int64)
    return op.Slice(logits, start, end, op.constant([1], np.int64))

"""The node's inputs: parameter columns, and edited and masked logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topw_deploy.export.tail.ops import Ops, Tensor, scope
from topw_deploy.export.tail.spec import TailSpec
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
    only_rule: the code of the row's rule where the function carries only Top-W; other codes are invalid. Else None.
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
    only_rule: Tensor | None = None


@scope
def row_parameters(op: Ops, inputs: Sequence[Tensor], only_rule: Tensor | None = None) -> Rows:
    """inputs: in the order of `PARAMETERS`, float32 [batch]; only_rule: int32 [batch], see `Rows`."""
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
        only_rule=None if only_rule is None else op.Cast(op.Unsqueeze(only_rule, axis), to=1),
    )


@scope
def within(op: Ops, rows: Rows, further: Sequence[Bounded] = ()) -> Tensor:
    """Whether columns are in their intervals: bool [batch, n].

    All are compared at once, because each node of the graph costs time.
    """
    if rows.only_rule is not None:
        further = [*further, (rows.only_rule, 0.0, 0.0)]
    bounds = [*_INTERVALS.values(), *((low, high) for _, low, high in further)]
    columns = op.Concat(*rows.given, *(column for column, _, _ in further), axis=1)
    lowest = op.constant([low for low, _ in bounds])
    highest = op.constant([high for _, high in bounds])
    return op.And(op.GreaterOrEqual(columns, lowest), op.LessOrEqual(columns, highest))


@scope
def all_true(op: Ops, flags: Tensor, axis: int | None = None) -> Tensor:
    """Whether all `flags` are true, over everything or over one axis, which is kept."""
    if axis is None:
        return op.Cast(op.ReduceMin(op.Cast(flags, to=1), keepdims=0), to=9)
    return op.Cast(all_numbers(op, flags, axis), to=9)


@scope
def all_numbers(op: Ops, flags: Tensor, axis: int = 1) -> Tensor:
    """1 where all `flags` over the axis are true, else 0: float32, the axis is kept."""
    return op.ReduceMin(op.Cast(flags, to=1), op.constant([axis], np.int64), keepdims=1)


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
def apply_mask(op: Ops, spec: TailSpec, logits: Tensor, words: Tensor, like: Tensor) -> Tensor:
    """Set tokens that are not allowed to -inf in padded logits [batch, padded] (docs/contract/graph.md, section 6).

    words: int32 [batch, ceil(vocab / 32)], or [batch, 0] to allow all.
    like: int32 [batch].

    Without words (k = 0), all rows use the extra row of flags, which follows the k unpacked ones. Gather with `like`
    gives the result the batch's own dimension name. onnxruntime reuses only buffers with equal dimension names, and
    its search for buffers among differently named ones took most of the time to open a session.
    """
    width, given = padded_width(spec.vocab_size), mask_words(spec.vocab_size)
    whole = op.Reshape(words, op.constant([-1, given], np.int64))  # [k, given], k = batch or 0
    # The padding is -inf, masked or not, so its words do not matter. (CUDA has no kernel for Pad with int32.)
    missing = width // WORD_BITS - given
    if missing:
        padding = op.Gather(whole, op.constant([given - 1] * missing, np.int64), axis=1)
        whole = op.Concat(whole, padding, axis=1)
    flags = allowed_tokens(op, whole, width)
    everything = op.Expand(op.constant(True, np.bool_), op.constant([1, width], np.int64))
    numbers = op.CumSum(op.Cast(op.Equal(like, like), to=7), op.constant(0, np.int64), exclusive=1)
    row = op.Min(numbers, _computed_length(op, whole) if spec.form == "static" else op.Shape(flags, start=0, end=1))
    allowed = op.Gather(op.Concat(flags, everything, axis=0), row, axis=0)
    return op.Where(allowed, logits, op.constant(-np.inf))


@scope
def _computed_length(op: Ops, rows: Tensor) -> Tensor:
    """k as int64 [1], of int32 [k, n].

    CUDA captures only steps that copy nothing from the CPU, where the result of Shape is.
    """
    column, zero = op.Gather(rows, op.constant(0, np.int64), axis=1), op.constant([0], np.int64)
    ones = op.Concat(zero, op.Cast(op.Equal(column, column), to=7), axis=0)
    return op.Gather(op.CumSum(ones, op.constant(0, np.int64)), op.constant([-1], np.int64), axis=0)


@scope
def allowed_tokens(op: Ops, words: Tensor, width: int) -> Tensor:
    """The bits of words int32 [k, width / 32], from the least significant: bool [k, width].

    The bits are looked up by octet, because NVIDIA's parser has no bitwise operators. Only the highest octet is signed.
    """
    halves = op.Reshape(low_and_high(op, words, 1 << 16), op.constant([0, width // 16], np.int64))
    values = np.arange(-128, 256)
    table = op.constant(values[:, None] >> np.arange(8) & 1, np.bool_)
    octets = op.Add(low_and_high(op, halves, 1 << 8), op.constant(-values[0], np.int32))
    return op.Reshape(op.Gather(table, octets, axis=0), op.constant([0, width], np.int64))


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

"""The options, inputs, outputs and attributes of a sampler node (docs/contract/graph.md, section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.export.embedding import EmbeddingForm
from topw_deploy.export.sampler.ops import Ops, Tensor, scope
from topw_deploy.sampling.parameters import GREEDY_BELOW, TopWOptions
from topw_deploy.sampling.row import WORD_BITS
from topw_deploy.sampling.rules import RULES, carried_rules

DOMAIN = "topw"
OP_TYPE = "TopWSample"
DOMAIN_VERSION = 1
OLDEST_OPSET, NEWEST_OPSET = 18, 24
LARGEST_VOCABULARY = 1 << 24
"""The largest vocabulary: the function passes token ids as float32, which holds every integer up to it."""

# float32 numbers: the largest finite one, the smallest positive one, and the largest one below 1.
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))

# Parameter -> the closed interval of its allowed values. A comparison with its ends is false for NaN.
_INTERVALS = {
    **dict.fromkeys(("temperature", "selection_temperature", "lam", "beta"), (0.0, LARGEST)),
    "init_top_p": (SMALLEST, 1.0),
    "geom_scale": (-LARGEST, LARGEST),
    "uniform": (0.0, BELOW_ONE),
}
PARAMETERS = tuple(_INTERVALS)

EDITED = ("logits", "edit_ids", "edit_penalty", "edit_bias")

SAMPLER_INPUTS = (*EDITED, "allowed", *PARAMETERS, "rule", "rule_values")
"""Inputs of every `topw::TopWSample` node, in order: int64 for edit_ids, int32 for allowed and rule, else float32.

logits [batch, vocab]; the three edit inputs [batch, edits] with edits >= 0; allowed [batch, words] with 0 or
ceil(vocab / 32) words; rule_values [batch, 2]; the rest [batch].
"""

GEOMETRY_INPUTS = ("mean", "inverse_std", "neighbour_bound")
"""Further inputs if the metric needs embeddings, all float32; after them come the embedding node's data inputs.

mean, inverse_std: [hidden], statistics of the table.
neighbour_bound: [vocab], a lower bound of each token's distance to its nearest neighbour; [0] for none.
"""


@dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """The options of one sampler node, fixed at export.

    options: Top-W's options.
    vocab_size: width of the logits, 1 to LARGEST_VOCABULARY.
    embedding: the decoder's embedding lookup; optional for the `uniform` metric.
    hidden_size: width of the embeddings; optional for the `uniform` metric.
    branches: whether the function skips work that a batch does not need, by `If`. Without, it has no control flow.
    opset: 18 to 24.
    with_mass: whether the node has the output `mass`.
    with_keep_mask: whether the node has the output `keep_mask`.
    rules: the names of the sampling rules that the function carries. Top-W is added if missing. A row with another rule
        is invalid.

    Raises ParameterError for a value out of range.
    """

    options: TopWOptions
    vocab_size: int
    embedding: EmbeddingForm | None = None
    hidden_size: int | None = None
    branches: bool = True
    opset: int = 23
    with_mass: bool = False
    with_keep_mask: bool = False
    rules: tuple[str, ...] = tuple(RULES)

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= LARGEST_VOCABULARY:
            raise ParameterError(
                f"vocab_size is {self.vocab_size}, but must be an integer in 1..{LARGEST_VOCABULARY}.", "vocab_size"
            )
        object.__setattr__(self, "rules", carried_rules(self.rules))
        if not OLDEST_OPSET <= self.opset <= NEWEST_OPSET:
            raise ParameterError(
                f"opset is {self.opset}, but the sampler needs {OLDEST_OPSET} to {NEWEST_OPSET}; convert the model.",
                "opset",
            )
        if self.has_geometry and (self.embedding is None or self.hidden_size is None):
            raise ParameterError(
                f"metric {self.options.metric!r} needs the embedding table and its width; give both or use 'uniform'."
            )

    @property
    def has_geometry(self) -> bool:
        """Whether the metric needs embeddings."""
        return self.options.metric != "uniform"

    @property
    def lookup(self) -> EmbeddingForm | None:
        """`embedding` if the metric needs it, else None."""
        return self.embedding if self.has_geometry else None

    @property
    def carries_rules(self) -> bool:
        """Whether the function carries rules other than Top-W."""
        return len(self.rules) > 1

    @cached_property
    def pool_size(self) -> int:
        """The number of tokens in the pool."""
        return min(self.options.top_m, self.vocab_size)


def sampler_inputs(spec: SamplerSpec) -> tuple[str, ...]:
    """The names of the node's inputs, in order; those of the embedding node are called `embedding_0`, `embedding_1`…"""
    if spec.lookup is None:
        return SAMPLER_INPUTS
    return (*SAMPLER_INPUTS, *GEOMETRY_INPUTS, *(f"embedding_{i}" for i in range(len(spec.lookup.inputs))))


def sampler_outputs(spec: SamplerSpec) -> tuple[str, ...]:
    """The names of the node's outputs, in order.

    next_token int64, logprob float32, kept int32 and certified bool, all [batch]. Then, if requested, mass float32
    [batch] and keep_mask bool [batch, vocab].
    """
    optional = (("mass", spec.with_mass), ("keep_mask", spec.with_keep_mask))
    return ("next_token", "logprob", "kept", "certified", *(name for name, wanted in optional if wanted))


def sampler_attributes(spec: SamplerSpec) -> dict[str, str | int]:
    """The node's attributes, which native kernels read; the function's body ignores them.

    plugin_namespace, plugin_version: TensorRT finds its plugin by them.
    knn_k: 0 for the potential `nearest`.
    with_mass, with_keep_mask: TensorRT derives the number of outputs from them.
    """
    return {
        "plugin_namespace": DOMAIN,
        "plugin_version": "1",
        "top_m": spec.options.top_m,
        "alt_iters": spec.options.alt_iters,
        "metric": spec.options.metric,
        "knn_k": spec.options.neighbours,
        "table_form": spec.lookup.form if spec.lookup is not None else "",
        "with_mass": int(spec.with_mass),
        "with_keep_mask": int(spec.with_keep_mask),
    }


BoundedColumn = tuple[Tensor, float, float]
"""A column float32 [batch, 1] with its lowest and highest allowed value."""

CANDIDATES = 64
"""The number of candidates. They lie in at most as many blocks, so the search reads this number of blocks."""

BLOCK = 128
"""Tokens in each block of the candidate search. Shorter blocks have more maxima to search, longer ones more logits."""


@dataclass(frozen=True)
class RowParameters:
    """The parameters of each row as columns [batch, 1], float32 unless stated otherwise.

    columns: the parameters as given, in the order of `PARAMETERS`.
    is_greedy: whether `temperature` is below 1e-5, bool.
    temperature: T, at least 1e-5.
    selection_temperature: Ts, which is T where the given value is 0.
    lam: weight of the entropy term.
    beta: weight of the log mass.
    reward: beta - lam; -1 in greedy rows.
    init_top_p: mass of the warm start, relative to the pool's.
    geom_scale: factor of distances; 0 in greedy rows.
    uniform: the number in [0, 1) that decides the draw.
    only_rule: the code of each row's rule, if the function carries only Top-W: a row with another code is then invalid.
        None if the function carries more rules.
    """

    columns: tuple[Tensor, ...]
    is_greedy: Tensor
    temperature: Tensor
    selection_temperature: Tensor
    lam: Tensor
    beta: Tensor
    reward: Tensor
    init_top_p: Tensor
    geom_scale: Tensor
    uniform: Tensor
    only_rule: Tensor | None = None


@scope
def row_parameters(op: Ops, inputs: Sequence[Tensor], only_rule: Tensor | None = None) -> RowParameters:
    """Turn the node's inputs into columns.

    inputs: float32 [batch], in the order of `PARAMETERS`.
    only_rule: the code of each row's rule, float32 [batch, 1], if the function carries only Top-W.
    """
    given = {name: op.Unsqueeze(value, [1]) for name, value in zip(PARAMETERS, inputs, strict=True)}
    temperature, chosen = given["temperature"], given["selection_temperature"]
    is_greedy = op.Less(temperature, GREEDY_BELOW)
    nonzero = op.Max(temperature, GREEDY_BELOW)
    changed = {
        "temperature": nonzero,
        "selection_temperature": op.Where(op.Equal(chosen, 0.0), nonzero, chosen),
        "reward": op.Where(is_greedy, -1.0, op.Sub(given["beta"], given["lam"])),
        "geom_scale": op.Where(is_greedy, 0.0, given["geom_scale"]),
    }
    return RowParameters(
        columns=tuple(given.values()), is_greedy=is_greedy, only_rule=only_rule, **{**given, **changed}
    )


@scope
def are_in_range(op: Ops, parameters: RowParameters, further: Sequence[BoundedColumn] = ()) -> Tensor:
    """Whether the parameters and `further` columns lie in their intervals: bool [batch, n], one column each.

    Concatenates the columns and compares them at once, because each node of the graph costs time.
    """
    if parameters.only_rule is not None:
        further = [*further, (parameters.only_rule, 0.0, 0.0)]
    bounds = [*_INTERVALS.values(), *((low, high) for _, low, high in further)]
    columns = op.Concat(*parameters.columns, *(column for column, _, _ in further), axis=1)
    lowest, highest = np.array(bounds, np.float32).T
    return op.And(op.GreaterOrEqual(columns, lowest), op.LessOrEqual(columns, highest))


@scope
def all_true(op: Ops, flags: Tensor) -> Tensor:
    """Whether all `flags` are true, bool scalar."""
    return op.Cast(op.ReduceMin(op.Cast(flags, to=1), keepdims=0), to=9)


@scope
def all_true_in_row(op: Ops, flags: Tensor) -> Tensor:
    """Whether all flags of a row are true: bool [batch, n] -> float32 [batch, 1], 1 for true, 0 for false."""
    return op.ReduceMin(op.Cast(flags, to=1), [1], keepdims=1)


@scope
def valid_rows(op: Ops, logits: Tensor, parameters: RowParameters) -> Tensor:
    """Whether a row is valid: bool [batch, 1].

    Its parameters must be in range, and its logits must have a finite one, no NaN and no +inf.
    """
    largest = op.ReduceMax(logits, [1], keepdims=1)
    usable = all_true_in_row(op, op.LessOrEqual(logits, LARGEST))  # the comparison is false for NaN
    bounds = [(largest, -LARGEST, LARGEST), (usable, 1.0, 1.0)]
    return op.Cast(all_true_in_row(op, are_in_range(op, parameters, bounds)), to=9)


def padded_width(vocab_size: int) -> int:
    """The number of columns of padded logits: whole blocks, with at least one padding column."""
    return (vocab_size // BLOCK + 1) * BLOCK


@scope
def apply_edits(op: Ops, vocab_size: int, logits: Tensor, ids: Tensor, penalty: Tensor, bias: Tensor) -> Tensor:
    """Pad logits [batch, vocab] with -inf to [batch, padded] and edit them (docs/contract/graph.md, section 6).

    A logit l becomes (l / penalty if l > 0 else l * penalty) + bias, or NaN unless penalty > 0. An edit with an id
    outside the vocabulary changes a padding column, which no token reads. Pad makes a copy, so onnxruntime can then
    scatter in place.

    ids: int64 [batch, edits], distinct where they are >= 0.
    penalty, bias: float32 [batch, edits].
    """
    padded = op.Pad(logits, [0, 0, 0, padded_width(vocab_size) - vocab_size], -np.inf)
    column = op.Min(op.Where(op.Less(ids, 0), vocab_size, ids), vocab_size)
    old = op.GatherElements(padded, column, axis=1)
    scaled = op.Where(op.Greater(old, 0.0), op.Div(old, penalty), op.Mul(old, penalty))
    new = op.Where(op.Greater(penalty, 0.0), op.Add(scaled, bias), np.nan)
    return op.ScatterElements(padded, column, new, axis=1)


@scope
def apply_mask(op: Ops, spec: SamplerSpec, logits: Tensor, words: Tensor, like: Tensor) -> Tensor:
    """Set the logits [batch, padded] of tokens that are not allowed to -inf (docs/contract/graph.md, section 6).

    words: int32 [batch, ceil(vocab / 32)], or [batch, 0] to allow all tokens.
    like: any int32 [batch]; only its shape is used.

    The words become k rows of flags, k = batch or 0; one more row, number k, allows every token. Row i of the batch
    reads row min(i, k) of the flags, which is the last one for all i if k = 0.

    The row numbers come from `like`, because the result then has the batch's own dimension name. onnxruntime reuses
    only buffers with equal dimension names, and its search for buffers among differently named ones took most of the
    time to open a session.
    """
    width, word_count = padded_width(spec.vocab_size), -(-spec.vocab_size // WORD_BITS)
    word_rows = op.Reshape(words, [-1, word_count])  # [k, word_count]
    # The padding's logits are -inf anyway, so any words will do. (CUDA has no kernel for Pad with int32.)
    missing = width // WORD_BITS - word_count
    if missing:
        padding = op.Gather(word_rows, [word_count - 1] * missing, axis=1)
        word_rows = op.Concat(word_rows, padding, axis=1)
    flags = allowed_tokens(op, word_rows, width)
    all_allowed = op.Expand(True, [1, width])
    numbers = op.CumSum(op.Cast(op.Equal(like, like), to=7), 0, exclusive=1)
    row = op.Min(numbers, _row_count_on_device(op, word_rows))
    allowed = op.Gather(op.Concat(flags, all_allowed, axis=0), row, axis=0)
    return op.Where(allowed, logits, -np.inf)


@scope
def _row_count_on_device(op: Ops, rows: Tensor) -> Tensor:
    """The number k of rows of an int32 tensor [k, n], int64 [1].

    The operator Shape has its result on the CPU, and a CUDA graph cannot capture the copy from there.
    """
    column = op.Gather(rows, 0, axis=1)
    ones = op.Concat([0], op.Cast(op.Equal(column, column), to=7), axis=0)
    return op.Gather(op.CumSum(ones, 0), [-1], axis=0)


@scope
def allowed_tokens(op: Ops, words: Tensor, width: int) -> Tensor:
    """Unpack words int32 [k, width / 32], from the least significant bit: bool [k, width].

    Looks each octet up in a table, because NVIDIA's parser has no bitwise operators. The table begins at -128: the
    highest octet of a word is signed.
    """
    halves = op.Reshape(low_and_high(op, words, 1 << 16), [0, width // 16])
    values = np.arange(-128, 256)
    table = (values[:, None] >> np.arange(8) & 1).astype(np.bool_)
    octets = op.Add(low_and_high(op, halves, 1 << 8), np.int32(-values[0]))
    return op.Reshape(op.Gather(table, octets, axis=0), [0, width])


@scope
def low_and_high(op: Ops, values: Tensor, base: int) -> Tensor:
    """Split each value into high * base + low with 0 <= low < base: int32 [k, n] -> [k, n, (low, high)]."""
    low = op.Mod(values, np.int32(base))
    high = op.Div(op.Sub(values, low), np.int32(base))
    return op.Concat(op.Unsqueeze(low, [2]), op.Unsqueeze(high, [2]), axis=2)


class InputLogits:
    """The node's input `logits`: as given, edited, or edited and masked.

    can_read_in_place: whether a branch searches the logits without a copy if no row has edits. Other functions always
        copy: for the padding to whole blocks, for `mass`, or because copying a small vocabulary costs less than a
        branch. Otherwise the edited logits are computed before all branches, which then share them.
    """

    def __init__(self, op: Ops, spec: SamplerSpec, inputs: Mapping[str, Tensor]) -> None:
        self._op, self._spec, self.inputs = op, spec, inputs
        has_whole_blocks = spec.vocab_size % BLOCK == 0 and spec.vocab_size // BLOCK >= CANDIDATES
        self.can_read_in_place = has_whole_blocks and not spec.with_mass
        if not self.can_read_in_place:
            self.edited()

    def edited(self) -> Tensor:
        """The logits with edits, float32 [batch, padded]."""
        return apply_edits(self._op, self._spec.vocab_size, *(self.inputs[name] for name in EDITED))

    def masked(self) -> Tensor:
        """The logits with edits and masks, float32 [batch, padded]."""
        return apply_mask(self._op, self._spec, self.edited(), self.inputs["allowed"], self.inputs["rule"])

    def unpadded(self) -> Tensor:
        """The logits with edits and masks, float32 [batch, vocab]."""
        return without_padding(self._op, self.masked(), self._spec.vocab_size)

    def is_empty(self, name: str) -> Tensor:
        """Whether the input `name` has no elements, bool scalar."""
        return self._op.Equal(self._op.Size(self.inputs[name]), 0)


@scope
def without_padding(op: Ops, logits: Tensor, vocab_size: int) -> Tensor:
    """The logits [batch, vocab] of padded ones [batch, padded]."""
    return op.Slice(logits, [0], [vocab_size], [1])

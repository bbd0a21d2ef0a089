"""The manifest's dataclasses."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from topw_deploy.dtypes import ELEMENT_TYPES, element_bytes
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters
from topw_deploy.sampling.rules import RULES

MANIFEST_NAME = "topw_manifest.json"
MODEL_NAME = "model.onnx"
FORMAT_VERSION = 1
KV_FORMS = ("concat", "static", "shared")
TARGETS = ("onnxruntime", "tensorrt")
STATUSES = ("provisional", "passed", "partial", "skipped")
STATE_KINDS = ("full", "window", "latent", "convolution", "recurrent")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that the manifest lists.

    sha256: in hexadecimal.
    size: in bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of the graph.

    dtype: lower-case ONNX element type, such as `float` or `int64`.
    shape: dimensions, or their names.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A tensor [batch, *shape] that a layer keeps between calls.

    layer: the layer that writes the tensor. In models that repeat layers, each repetition has a number of its own.
    kind: one of STATE_KINDS.
        full: keys or values of all tokens.
        window: keys or values of the last `window` tokens.
        latent: keys and values of all tokens, compressed.
        convolution: the last columns of the input of a causal convolution, a mean of a block of tokens, or an n-gram.
        recurrent: the state of a recurrence.
        All but `full` and `latent` have a fixed size and start as zeros.
    past, present: names of the graph's input and output for this tensor.
    dtype: lower-case ONNX element type.
    shape: the shape of one row. 0 stands for the axis of tokens; at most one axis is 0.
    window: for the kind `window`, the number of tokens that a query sees, its own included; otherwise 0. The operator
        counts padding as tokens when it drops old ones, so the rows of a call must have equal lengths.
    shared_by: later layers that also read the tensor.
    """

    layer: int
    kind: str
    past: str
    present: str
    dtype: str
    shape: tuple[int, ...]
    window: int = 0
    shared_by: tuple[int, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether the tensor's size depends on the number of tokens."""
        return 0 in self.shape

    def sized(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of a row that has room for `tokens` tokens."""
        return tuple(tokens if size == 0 else size for size in self.shape)

    def row_bytes(self, tokens: int) -> int:
        """Return the bytes of a row that has room for `tokens` tokens."""
        return math.prod(self.sized(tokens)) * element_bytes(self.dtype)


def key_value_states(
    layer: int,
    dtype: str,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    window: int = 0,
    shared_by: tuple[int, ...] = (),
) -> tuple[State, State]:
    """Return the states of an attention layer's keys and values, each [batch, heads, tokens, dim].

    window: the number of tokens that are kept; 0 keeps all.
    """

    def state(part: str, dim: int) -> State:
        return State(
            layer=layer,
            kind="window" if window else "full",
            past=f"past_key_values.{layer}.{part}",
            present=f"present.{layer}.{part}",
            dtype=dtype,
            shape=(heads, window, dim),
            window=window,
            shared_by=shared_by,
        )

    return state("key", key_dim), state("value", value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInfo:
    """How the runtime drives the decoder (docs/contract/graph.md, section 8).

    model_type: transformers' name of the architecture.
    kv_form: one of KV_FORMS.
        concat: the graph returns the past followed by the new tokens.
        static: the graph updates one buffer in place, and has the length of each row as an input.
        shared: like static, in another exporter's graph, with attention_mask instead of lengths.
    states: what the layers keep between calls, in layer order.
    kv_dtype: ONNX element type of keys and values, "float" or "float16".
    context_length: maximum number of tokens of a sequence.
    left_padding, right_padding: whether batches can be padded on that side. `concat` can be padded on the left,
    `shared`
        on the right, and `static`, which has row lengths, on neither.
    weights_dtype: the type of the weights: an ONNX element type such as "float", or "int4" or "int8" if quantised.
    attention: the operator that reads the cache, "GroupQueryAttention", "Attention" or "", for information.
    ragged_chunks: whether one call can append several tokens to each row of a batch. If not, a call takes several
    tokens
        only for empty caches, or for a single row.
    most_columns: maximum number of tokens per row and call; 0 for any.
    buffer_step: tokens. The length of a buffer is the smallest sufficient multiple of this number. 0 if the cost of a
        step does not depend on the length.
    buffer_least: minimum length of a buffer in tokens; 0 for any. Operators whose sliding window lies in the buffer
        refuse shorter buffers.
    target: one of TARGETS.
    least_onnxruntime: the first version that runs the graph, such as "1.29"; "" for any supported version.
    weights: bytes of initializers by element type.
    quantisation: the fields of export.quantise.Quantisation; {} if this package did not quantise the weights.
    """

    model_type: str
    kv_form: str
    num_layers: int
    states: tuple[State, ...]
    kv_dtype: str
    context_length: int
    left_padding: bool
    weights_dtype: str = "float"
    attention: str = ""
    right_padding: bool = False
    ragged_chunks: bool = True
    most_columns: int = 0
    buffer_step: int = 0
    buffer_least: int = 0
    target: str = "onnxruntime"
    least_onnxruntime: str = ""
    weights: dict[str, int] = field(default_factory=dict)
    quantisation: dict[str, Any] = field(default_factory=dict)

    def state_bytes(self) -> dict[str, tuple[int, int]]:
        """Return {kind: (bytes of a row at any length, additional bytes per token)} for the decoder's kinds."""
        found: dict[str, tuple[int, int]] = {}
        for kind in STATE_KINDS:
            states = [state for state in self.states if state.kind == kind and state.dtype in ELEMENT_TYPES]
            fixed = sum(state.row_bytes(0) for state in states)
            if states:
                found[kind] = fixed, sum(state.row_bytes(1) for state in states) - fixed
        return found

    @property
    def evicts(self) -> bool:
        """Whether a layer's state drops the tokens that have left its window.

        Prompts of different lengths must then be read one by one.
        """
        return any(state.window for state in self.states)

    @property
    def recurs(self) -> bool:
        """Whether a state has a fixed size.

        Each token must then be read exactly once, because it changes that state.
        """
        return any(not state.grows for state in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """The options of the `topw::TopWSample` node.

    branches: whether the function skips work by branches; without, it has no control flow.
    hidden_size: the width of the embeddings; None for the uniform metric.
    table_form: the operator and attributes that read an embedding, "" for the uniform metric.
    outputs: names of the sampler's outputs in the graph.
    neighbour_bound: whether the node has the neighbour bound, as input 16.
    rules: the sampling rules that the function can apply, in the order of their codes.
    """

    branches: bool
    vocab_size: int
    hidden_size: int | None
    table_form: str
    options: TopWOptions
    outputs: tuple[str, ...]
    neighbour_bound: bool = False
    rules: tuple[str, ...] = tuple(RULES)

    @property
    def geometry(self) -> tuple[str, int | None]:
        """(metric, width of the embeddings)."""
        return self.options.metric, self.hidden_size


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a comparison.

    difference: the largest difference that was found.
    bound: the largest difference with which the check passes.
    """

    name: str
    passed: bool
    difference: float
    bound: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NotCompared:
    """A comparison that was not possible, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A measurement that cannot fail, for information."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of an export with its source. If the comparison fails, there is no folder.

    status: one of STATUSES.
        provisional: not yet compared. The folder does not load.
        passed: all checks ran and passed.
        partial: something was not compared, or a failed check limits how the export can be used (see its detail).
        skipped: the user did not ask for a comparison.
    checks: comparisons that can fail.
    not_compared: comparisons that were not possible. If there are any, the status is "partial".
    notes: measurements, which do not affect the status.
    median_distance: median distance of likely pairs of tokens (sampling.geometry), > 0; None if not measured.
    """

    status: str
    checks: tuple[Check, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()
    median_distance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Base of `DecoderManifest` and `SamplerManifest`.

    source: `id`, `revision` and `route` of the model.
    libraries: versions of topw_deploy and of the libraries used for the export.
    opset: opset version by domain.
    defaults: the sampler's parameters for callers that give none.
    default_beta: the formula of the default `beta` if it depends on the temperature, else "". `defaults` then has its
        value at the default temperature.
    files: the files of the folder by path, without the manifest itself.
    """

    format_version: int = FORMAT_VERSION
    kind: str = ""
    source: dict[str, str]
    libraries: dict[str, str]
    opset: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sampler: SamplerInfo
    defaults: TopWParameters
    default_beta: str = ""
    verification: Verification = field(default_factory=lambda: Verification(status="skipped"))
    files: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def median_distance(self) -> float | None:
        """Median distance of likely pairs of tokens (sampling.geometry); None if it was not measured."""
        return 1.0 if self.sampler.options.metric == "uniform" else self.verification.median_distance

    @property
    def stated_defaults(self) -> dict[str, Any]:
        """The default parameters as the user gave them: `beta` as a formula if it depends on the temperature."""
        return {**asdict(self.defaults), **({"beta": self.default_beta} if self.default_beta else {})}

    def to_json(self) -> str:
        """Return the text of topw_manifest.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderManifest(Manifest):
    """The manifest of a decoder with a sampler."""

    kind: str = "decoder"
    decoder: DecoderInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerManifest(Manifest):
    """The manifest of a sampler without a decoder."""

    kind: str = "sampler"

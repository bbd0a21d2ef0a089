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
    """A listed file: hexadecimal SHA-256, size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Graph input or output: lower-case ONNX element type (`float`, `int64`), dimensions or their names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A tensor that a layer keeps between calls: graph input `past`, output `present`, [batch, *shape].

    layer: the layer that writes it; in models that repeat layers, one number per repetition.
    kind: one of STATE_KINDS.
        full: keys or values of all tokens.
        window: keys or values of the last `window` tokens.
        latent: keys and values of all tokens, compressed.
        convolution: the last columns of the input of a causal convolution, a mean of a block of tokens, or an n-gram.
        recurrent: the state of a recurrence.
        All but `full` and `latent` have a fixed size and start as zeros.
    dtype: lower-case ONNX element type.
    shape: of one row. 0 is the axis of tokens, in at most one place.
    window: for the kind `window`, the number of tokens that a query sees, itself included; otherwise 0. The operator
        counts padding as tokens when it evicts, so the rows of a call must have equal lengths.
    shared_by: later layers that read it too.
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
        """Whether its size depends on the number of tokens."""
        return 0 in self.shape

    def sized(self, tokens: int) -> tuple[int, ...]:
        """Shape of a row with room for `tokens` tokens."""
        return tuple(tokens if size == 0 else size for size in self.shape)

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row with room for `tokens` tokens."""
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
    """The keys and values of an attention layer, each [batch, heads, tokens, dim].

    window: number of tokens kept; 0 for all.
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

    kv_form: one of KV_FORMS. `concat`: past in, past plus new tokens out. `static`: one buffer updated in place, with
    the length of each row. `shared`: such a buffer in another exporter's graph, with attention_mask.
    states: what the layers keep between calls, in layer order.
    kv_dtype: ONNX element type of keys and values, "float" or "float16".
    context_length: maximum tokens of a sequence.
    left_padding, right_padding: whether batches can be padded on that side (`concat` left, `shared` right, `static`
    neither: it has row lengths).
    attention: operator that reads the cache, "GroupQueryAttention", "Attention" or "", for information.
    ragged_chunks: whether all rows of a batch can take several tokens after a past in one run. If not, a run takes
    several tokens only into an empty cache or for a single row.
    most_columns: maximum tokens per row and call, 0 for any.
    buffer_step: 0 if a step's cost does not depend on the buffer length; otherwise buffers have the smallest sufficient
    multiple of it as length.
    buffer_least: minimum tokens of a buffer, 0 for any. Operators whose sliding window lies in the buffer refuse
    shorter ones.
    target: one of TARGETS.
    least_onnxruntime: first version that runs the graph, such as "1.29"; "" for any supported one.
    weights: bytes of initializers by element type.
    quantisation: fields of export.quantise.Quantisation, {} if this package did not quantise.
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
        """Kind -> (bytes of a row independent of its length, bytes per token), for the kinds that the decoder has."""
        found: dict[str, tuple[int, int]] = {}
        for kind in STATE_KINDS:
            states = [state for state in self.states if state.kind == kind and state.dtype in ELEMENT_TYPES]
            fixed = sum(state.row_bytes(0) for state in states)
            if states:
                found[kind] = fixed, sum(state.row_bytes(1) for state in states) - fixed
        return found

    @property
    def evicts(self) -> bool:
        """Whether a state keeps only a window, so that prompts of different lengths must be read one by one."""
        return any(state.window for state in self.states)

    @property
    def recurs(self) -> bool:
        """Whether each token must be read exactly once, because a state of fixed size absorbs it."""
        return any(not state.grows for state in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """Options and form of the `topw::TopWSample` node."""

    tail: str  # "portable" | "onnxruntime" | "static"
    vocab_size: int
    hidden_size: int | None  # None: uniform metric
    table_form: str  # "" for the uniform metric
    options: TopWOptions
    outputs: tuple[str, ...]
    neighbour_bound: bool = False  # whether the node has it, as input 16
    rules: tuple[str, ...] = tuple(RULES)  # that the function carries, in the order of their codes

    @property
    def geometry(self) -> tuple[str, int | None]:
        """Metric and embedding width."""
        return self.options.metric, self.hidden_size


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison's largest difference and its bound."""

    name: str
    passed: bool
    difference: float
    bound: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NotCompared:
    """A comparison that was not possible."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A measurement, for information only."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison with the source. A failed export leaves no folder.

    status: one of STATUSES. "provisional": unverified, does not load. "passed": all checks ran and passed. "partial":
    something was not compared, or a failed check limits use (see its detail). "skipped": not requested.
    checks: comparisons that can fail.
    not_compared: if there are any, the status is "partial".
    notes: do not affect the status.
    median_distance: of likely pairs of tokens (sampling.likely_pairs), > 0; None if it was not measured.
    """

    status: str
    checks: tuple[Check, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()
    median_distance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Base of `DecoderManifest` and `SamplerManifest`.

    default_beta: text of the default `beta` if that depends on the temperature, else ""; `defaults` then has its number
    at the default temperature.
    """

    format_version: int = FORMAT_VERSION
    kind: str = ""
    source: dict[str, str]  # id, revision, route
    libraries: dict[str, str]  # topw_deploy and the export's libraries
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
        """Median distance of likely pairs of tokens (sampling.likely_pairs); None if it was not measured."""
        return 1.0 if self.sampler.options.metric == "uniform" else self.verification.median_distance

    @property
    def stated_defaults(self) -> dict[str, Any]:
        """The default parameters as they were given: `beta` as text if it depends on the temperature."""
        return {**asdict(self.defaults), **({"beta": self.default_beta} if self.default_beta else {})}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderManifest(Manifest):
    """Decoder with sampler."""

    kind: str = "decoder"
    decoder: DecoderInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerManifest(Manifest):
    """Manifest of a sampler alone."""

    kind: str = "sampler"

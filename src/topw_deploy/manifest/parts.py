"""The parts of a manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from topw_deploy.sampling.parameters import TopWOptions

KV_FORMS = ("concat", "static", "shared")
TARGETS = ("onnxruntime", "tensorrt")
STATUSES = ("provisional", "passed", "partial", "skipped")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file beside the manifest: SHA-256 in hexadecimal and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output: ONNX element type in lower case (`float`, `int64`), dimensions or their names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInfo:
    """The decoder around the sampler, as the runtime must drive it (docs/contract/graph.md, section 8).

    kv_form: `concat`, past in and past + new tokens out; `static`, one buffer for both, with lengths per row; `shared`,
    such a buffer in another exporter's graph, which takes an attention_mask.
    attention: the operator that reads the cache, for people. ragged_chunks: whether rows of a batch may take several
    tokens each behind a past; if not, they take them into an empty cache, one at a time, or each row alone.
    buffer_step: 0 if a step's cost does not depend on the buffer's length; otherwise the runtime keeps the buffer just
    above what is needed, at a multiple of this. buffer_least: fewest tokens that a buffer must hold, 0 for any: an
    operator that keeps a sliding window in it refuses a shorter one. left_padding, right_padding: whether rows of one
    batch may have different lengths, padded on that side (`concat` on the left, `shared` on the right; `static` has
    lengths per row and needs neither). weights: bytes of initializers by element type.
    quantisation: how this package quantised the weights (export.quantise.Quantisation's fields), {} if it did not.
    """

    model_type: str
    kv_form: str  # one of KV_FORMS
    num_layers: int
    num_kv_heads: tuple[int, ...]  # one per layer: they may differ
    head_dim: tuple[int, ...]  # one per layer
    kv_dtype: str  # ONNX element type of the cache, "float" or "float16"
    context_length: int  # most tokens a sequence may have
    left_padding: bool
    weights_dtype: str = "float"
    attention: str = ""  # "GroupQueryAttention" | "Attention" | ""
    right_padding: bool = False
    ragged_chunks: bool = True
    buffer_step: int = 0
    buffer_least: int = 0
    target: str = "onnxruntime"  # one of TARGETS
    weights: dict[str, int] = field(default_factory=dict)
    quantisation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """The one `topw::TopWSample` node: its baked options and form."""

    tail: str  # "portable" | "onnxruntime" | "static"
    vocab_size: int
    hidden_size: int | None  # None: the uniform metric has no embeddings
    table_form: str  # "" for the uniform metric
    options: TopWOptions
    outputs: tuple[str, ...]
    neighbour_bound: bool = False  # whether node input 13 holds one

    @property
    def geometry(self) -> tuple[str, int | None]:
        """The metric and the width of the embeddings."""
        return self.options.metric, self.hidden_size


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verification: the largest difference seen and the bound it must stay under."""

    name: str
    passed: bool
    difference: float
    bound: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NotCompared:
    """Something that the verification could not compare, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A measurement for information, which decides nothing."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What comparing the export with its source found. A failed export leaves no folder.

    status: one of STATUSES. "provisional": not verified yet, does not load. "passed": every check ran and passed.
        "partial": something was not compared, or a check failed and left a limit, which its detail states.
        "skipped": not asked for.
    checks: each can fail.
    not_compared: each makes the status "partial".
    notes: they do not change the status.
    """

    status: str
    checks: tuple[Check, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()

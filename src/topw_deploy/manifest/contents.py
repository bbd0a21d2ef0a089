"""The manifest's dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

MANIFEST_NAME = "topw_manifest.json"
FORMAT_VERSION = 1
KV_FORMS = ("concat", "static", "shared")
TARGETS = ("onnxruntime", "tensorrt")
STATUSES = ("provisional", "passed", "partial", "skipped")


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
class DecoderInfo:
    """How the runtime drives the decoder (docs/contract/graph.md, section 8).

    kv_form: one of KV_FORMS. `concat`: past in, past plus new tokens out. `static`: one buffer updated in place, with
    the length of each row. `shared`: such a buffer in another exporter's graph, with attention_mask.
    num_kv_heads, head_dim: one per layer.
    kv_dtype: the cache's ONNX element type, "float" or "float16".
    context_length: maximum tokens of a sequence.
    left_padding, right_padding: whether batches can be padded on that side (`concat` left, `shared` right, `static`
    neither: it has row lengths).
    attention: operator that reads the cache, "GroupQueryAttention", "Attention" or "", for information.
    ragged_chunks: whether all rows of a batch can take several tokens after a past in one run. If not, a run takes
    several tokens only into an empty cache or for a single row.
    buffer_step: 0 if a step's cost does not depend on the buffer length; otherwise buffers have the smallest sufficient
    multiple of it as length.
    buffer_least: minimum tokens of a buffer, 0 for any. Operators whose sliding window lies in the buffer refuse
    shorter ones.
    target: one of TARGETS.
    weights: bytes of initializers by element type.
    quantisation: fields of export.quantise.Quantisation, {} if this package did not quantise.
    """

    model_type: str
    kv_form: str
    num_layers: int
    num_kv_heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    kv_dtype: str
    context_length: int
    left_padding: bool
    weights_dtype: str = "float"
    attention: str = ""
    right_padding: bool = False
    ragged_chunks: bool = True
    buffer_step: int = 0
    buffer_least: int = 0
    target: str = "onnxruntime"
    weights: dict[str, int] = field(default_factory=dict)
    quantisation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInfo:
    """Options and form of the `topw::TopWSample` node."""

    tail: str  # "portable" | "onnxruntime" | "static"
    vocab_size: int
    hidden_size: int | None  # None: uniform metric
    table_form: str  # "" for the uniform metric
    options: TopWOptions
    outputs: tuple[str, ...]
    neighbour_bound: bool = False  # whether the node has it, as input 13

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
    """

    status: str
    checks: tuple[Check, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Base of `DecoderManifest` and `SamplerManifest`."""

    format_version: int = FORMAT_VERSION
    kind: str = ""
    source: dict[str, str]  # id, revision, route
    libraries: dict[str, str]  # topw_deploy and the export's libraries
    opset: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sampler: SamplerInfo
    defaults: TopWParameters
    verification: Verification = field(default_factory=lambda: Verification(status="skipped"))
    files: dict[str, FileEntry] = field(default_factory=dict)

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

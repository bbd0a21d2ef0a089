"""What a manifest contains, as dataclasses."""

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
    """A file beside the manifest: its SHA-256 in hexadecimal and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A graph input or output: ONNX element type in lower case (`float`, `int64`), dimensions or their names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderInfo:
    """The decoder around the sampler, as the runtime must drive it (docs/contract/graph.md, section 8).

    kv_form: one of KV_FORMS. `concat`: past in, past and new tokens out. `static`: one buffer, written in place, with
        lengths per row. `shared`: such a buffer in another exporter's graph, which takes an attention_mask.
    num_kv_heads, head_dim: one value per layer, as they may differ.
    kv_dtype: ONNX element type of the cache, "float" or "float16".
    context_length: the most tokens of a sequence.
    left_padding, right_padding: whether rows of a batch may have different lengths, padded on that side (`concat` on
        the left, `shared` on the right; `static` has lengths per row and needs neither).
    attention: the operator that reads the cache, "GroupQueryAttention", "Attention" or "", for information.
    ragged_chunks: whether rows of a batch may take several tokens each after a past. If not, they take them into an
        empty cache, one at a time, or each row alone.
    buffer_step: 0 if a step's cost does not depend on the buffer's length; otherwise the runtime keeps the buffer at
        the smallest sufficient multiple of this.
    buffer_least: fewest tokens that a buffer must hold, 0 for any. An operator that keeps a sliding window in the
        buffer refuses a shorter one.
    target: one of TARGETS.
    weights: bytes of initializers by element type.
    quantisation: how this package quantised the weights (the fields of export.quantise.Quantisation), {} if it did
        not.
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
    """The `topw::TopWSample` node: its fixed options and its form."""

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
    """A line of the verification: the largest difference found, and the bound that it must not exceed."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contract of one exported folder: a `DecoderManifest` or a `SamplerManifest`."""

    format_version: int = FORMAT_VERSION
    kind: str = ""
    source: dict[str, str]  # id, revision, route
    libraries: dict[str, str]  # topw_deploy and what it exported with
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
    """The manifest of a decoder with the sampler in its graph."""

    kind: str = "decoder"
    decoder: DecoderInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerManifest(Manifest):
    """The manifest of a sampler alone."""

    kind: str = "sampler"

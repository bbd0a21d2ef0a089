"""What an export is asked for, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.export.graft.sampler_node import GraftOptions
from topw_deploy.export.quantise.scheme import DTYPE_BITS, Quantisation
from topw_deploy.manifest import TARGETS, TensorSpec, Verification
from topw_deploy.sampling import as_float32
from topw_deploy.sampling.parameters import PRESETS, TopWOptions, TopWParameters
from topw_deploy.sizes import parse_size

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int4": "float32", "int8": "float32"}
"""Names of --dtype -> torch's type of the traced weights; those of int4 and int8 are quantised afterwards."""
COMPUTE_DTYPES = ("fp32", "fp16")
DTYPE_ALIASES = {"f32": "fp32", "float32": "fp32", "f16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
DEFAULT_OPSET = 23
KV_REQUESTS = ("static", "concat")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """All that `topw-export` can be told.

    model: hub id, folder, ONNX file or `demo`. output: the folder to write.
    dtype: fp32, fp16, bf16, int4 or int8; opset: of the traced graph; kv: the cache's form, static or concat; target:
    whose operators the decoder is written in, onnxruntime or tensorrt. None for the defaults (fp32; 23, or 24 for
    tensorrt; static where the decoder can; onnxruntime), the only choice for an ONNX decoder that exists already, as
    is num_hidden_layers.
    compute_dtype: fp32 or fp16, the type of all but the weights in an int4 or int8 export; None for fp32.
    max_length: tokens that a static cache for tensorrt holds, fixed in the graph. None for the model's context, at most
    4,096; 0 leaves the length to the runtime, which only onnxruntime accepts.
    block_size, table_bits, symmetric, accuracy_level, quantisation_algorithm, exclude_nodes: of int4 and int8, see
    quantise.Quantisation; None for its defaults.
    options: baked into the sampler; defaults: parameters of a request that names none.
    neighbour_bound: measure how near each token's nearest other is, and store it (export/graft/neighbour_bound.py).
    max_shard_size: bytes of a data file at most, or text such as "2GB" (10^9 each) or "2GiB"; None for one file.
    resume: go on where an interrupted export of the same folder stopped, and can be gone on with itself.
    hard_link: share the data files of an ONNX decoder with its folder instead of copying them (see folder.bring).
    tokenizer: folder to take tokenizer and configuration from, for a model that comes without.
    Raises ParameterError for a dtype, opset, cache form, target or layer count out of range, for a combination that
    does not exist, for defaults that float32 cannot hold, and for a bound under the uniform metric.
    """

    model: str
    output: Path
    dtype: str | None = None
    opset: int | None = None
    kv: str | None = None
    target: str | None = None
    max_length: int | None = None
    compute_dtype: str | None = None
    block_size: int | None = None
    table_bits: int | None = None
    symmetric: bool | None = None
    accuracy_level: int | None = None
    quantisation_algorithm: str | None = None
    exclude_nodes: tuple[str, ...] = ()
    options: TopWOptions = field(default_factory=TopWOptions)
    defaults: TopWParameters = field(default_factory=TopWParameters)
    tail: str = "portable"
    with_logits: bool = False
    with_mass: bool = False
    with_keep_mask: bool = False
    neighbour_bound: bool = False
    num_hidden_layers: int | None = None
    tokenizer: Path | None = None
    max_shard_size: int | str | None = None
    hard_link: bool = False
    resume: bool = False
    dry_run: bool = False
    overwrite: bool = False
    verify: bool = True
    keep_failed: bool = False
    revision: str | None = None
    cache_dir: Path | None = None
    token: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ParameterError(f"dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}.", "dtype")
        if self.compute_dtype is not None and self.compute_dtype not in COMPUTE_DTYPES:
            raise ParameterError(
                f"compute_dtype is {self.compute_dtype!r}, but must be one of {', '.join(COMPUTE_DTYPES)}.",
                "compute_dtype",
            )
        if self.opset is not None and not 23 <= self.opset <= 24:
            raise ParameterError(
                f"opset is {self.opset}, but must be 23 or 24: older ones have no Attention operator.", "opset"
            )
        if self.kv is not None and self.kv not in KV_REQUESTS:
            raise ParameterError(f"kv is {self.kv!r}, but must be one of {', '.join(KV_REQUESTS)}.", "kv")
        if self.target is not None and self.target not in TARGETS:
            raise ParameterError(f"target is {self.target!r}, but must be one of {', '.join(TARGETS)}.", "target")
        if self.target == "tensorrt" and self.kv != "concat" and self.opset == 23:
            raise ParameterError(
                "opset is 23, but TensorScatter, tensorrt's cache, needs 24; leave --opset out.", "opset"
            )
        if self.max_length is not None and (self.target != "tensorrt" or self.kv == "concat"):
            raise ParameterError(
                "max_length fixes the static cache of tensorrt; leave it out for others.", "max_length"
            )
        if self.max_length is not None and (self.max_length < 0 or self.max_length % 64):
            raise ParameterError(
                f"max_length is {self.max_length}, but must be a multiple of 64, or 0 to leave it to onnxruntime.",
                "max_length",
            )
        if self.num_hidden_layers is not None and self.num_hidden_layers < 1:
            raise ParameterError(
                f"num_hidden_layers is {self.num_hidden_layers}, but must be an integer >= 1.", "num_hidden_layers"
            )
        as_float32(self.defaults)  # what no graph can be handed is no default
        check_bound(self.neighbour_bound, self.options)
        _ = self.shard_bytes
        if self.quantisation is not None and self.target == "tensorrt":
            raise ParameterError(
                f"dtype is {self.dtype}, but target tensorrt has no operator for quantised weights (MatMulNBits); "
                "export as fp16 or fp32.",
                "dtype",
            )

    @property
    def shard_bytes(self) -> int | None:
        """max_shard_size in bytes. Raises ParameterError for what is no size."""
        return None if self.max_shard_size is None else parse_size(self.max_shard_size, "max_shard_size")

    @property
    def torch_dtype(self) -> str:
        """torch's name of the type that the decoder is traced in."""
        return DTYPES[self.compute_dtype or self.dtype or "fp32"]

    @property
    def quantisation(self) -> Quantisation | None:
        """How the weights are quantised; None for a floating-point dtype. Raises ParameterError for wrong options."""
        given = {
            "block_size": self.block_size,
            "table_bits": self.table_bits,
            "symmetric": self.symmetric,
            "accuracy_level": self.accuracy_level,
            "algorithm": self.quantisation_algorithm,
            "exclude": tuple(self.exclude_nodes) or None,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.dtype in DTYPE_BITS:
            return Quantisation(bits=DTYPE_BITS[self.dtype], **chosen)
        if self.compute_dtype is not None:
            chosen = {"compute_dtype": self.compute_dtype, **chosen}
        if chosen:
            raise ParameterError(
                f"{next(iter(chosen))} is an option of quantised weights, but dtype is {self.dtype or 'fp32'}; "
                "give --dtype int4 or int8, or leave it out.",
                next(iter(chosen)),
            )
        return None

    @property
    def graft(self) -> GraftOptions:
        return GraftOptions(
            options=self.options,
            tail=self.tail,
            with_logits=self.with_logits,
            with_mass=self.with_mass,
            with_keep_mask=self.with_keep_mask,
        )


def check_bound(wanted: bool, options: TopWOptions) -> None:
    """Raises ParameterError for a neighbour bound under the uniform metric, whose distances are all 1."""
    if wanted and options.metric == "uniform":
        raise ParameterError(
            "the uniform metric has no neighbour bound to store; leave --neighbour-bound out.", "neighbour_bound"
        )


def with_preset(
    preset: str, parameters: dict[str, float], options: dict[str, object]
) -> tuple[TopWParameters, TopWOptions]:
    """Default parameters and baked options of `preset`, with the given ones in place of the preset's."""
    if preset not in PRESETS:
        raise ParameterError(f"preset is {preset!r}, but must be one of {', '.join(PRESETS)}.", "preset")
    base_parameters, base_options = PRESETS[preset]
    merged_parameters = {name: getattr(base_parameters, name) for name in TopWParameters.__slots__} | parameters
    merged_options = {name: getattr(base_options, name) for name in TopWOptions.__slots__} | options
    return TopWParameters(**merged_parameters), TopWOptions(**merged_options)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, or would be (`dry_run`). Sizes in bytes; `notices`: what the user should know.

    sizes: file -> bytes. memory: stage -> most bytes resident while it ran, measured, or in a dry run foreseen; the
    stages are graph (until the graph is finished), writing and, in a process of its own, verification.
    """

    output: Path
    dry_run: bool
    model_type: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: int
    weight_bytes: int
    file_bytes: int
    files: tuple[str, ...]
    seconds: float
    verification: Verification
    notices: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

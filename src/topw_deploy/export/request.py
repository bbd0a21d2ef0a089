"""What an export is asked for, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from topw_deploy.errors import ParameterError
from topw_deploy.export.graft import GraftOptions
from topw_deploy.manifest import TensorSpec, Verification
from topw_deploy.sampling import as_float32
from topw_deploy.sampling.parameters import PRESETS, TopWOptions, TopWParameters

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Names of --dtype -> torch's."""
DTYPE_ALIASES = {"f32": "fp32", "float32": "fp32", "f16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
DEFAULT_OPSET = 23


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """All that `topw-export` can be told.

    model: hub id, folder, ONNX file or `demo`. output: the folder to write.
    dtype: fp32, fp16 or bf16; opset: of the traced graph; both None for the defaults (fp32, 23), the only choice for
    an ONNX decoder that exists already, as is num_hidden_layers.
    options: baked into the sampler; defaults: parameters of a request that names none.
    neighbour_bound: measure how near each token's nearest other is, and store it (export/neighbour_bound.py).
    hard_link: share the data files of an ONNX decoder with its folder instead of copying them (see folder.bring).
    tokenizer: folder to take tokenizer and configuration from, for a model that comes without.
    Raises ParameterError for a dtype, opset or layer count out of range, for defaults that float32 cannot hold, and
    for a bound under the uniform metric.
    """

    model: str
    output: Path
    dtype: str | None = None
    opset: int | None = None
    options: TopWOptions = field(default_factory=TopWOptions)
    defaults: TopWParameters = field(default_factory=TopWParameters)
    tail: str = "portable"
    with_logits: bool = False
    with_mass: bool = False
    with_keep_mask: bool = False
    neighbour_bound: bool = False
    num_hidden_layers: int | None = None
    tokenizer: Path | None = None
    hard_link: bool = False
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
            raise ParameterError(f"dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}.")
        if self.opset is not None and not 23 <= self.opset <= 24:
            raise ParameterError(f"opset is {self.opset}, but must be 23 or 24: older ones have no Attention operator.")
        if self.num_hidden_layers is not None and self.num_hidden_layers < 1:
            raise ParameterError(f"num_hidden_layers is {self.num_hidden_layers}, but must be an integer >= 1.")
        as_float32(self.defaults)  # what no graph can be handed is no default
        check_bound(self.neighbour_bound, self.options)

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
        raise ParameterError("the uniform metric has no neighbour bound to store; leave --neighbour-bound out.")


def with_preset(
    preset: str, parameters: dict[str, float], options: dict[str, object]
) -> tuple[TopWParameters, TopWOptions]:
    """Default parameters and baked options of `preset`, with the given ones in place of the preset's."""
    if preset not in PRESETS:
        raise ParameterError(f"preset is {preset!r}, but must be one of {', '.join(PRESETS)}.")
    base_parameters, base_options = PRESETS[preset]
    merged_parameters = {name: getattr(base_parameters, name) for name in TopWParameters.__slots__} | parameters
    merged_options = {name: getattr(base_options, name) for name in TopWOptions.__slots__} | options
    return TopWParameters(**merged_parameters), TopWOptions(**merged_options)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, or would be (`dry_run`). Sizes in bytes; `notices`: what the user should know."""

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

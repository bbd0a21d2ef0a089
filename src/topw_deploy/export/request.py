"""What a caller asks of an export, and what it reports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from topw_deploy.errors import ParameterError
from topw_deploy.export.quantise.scheme import DTYPE_BITS, Quantisation
from topw_deploy.export.source.resolve import HubOptions
from topw_deploy.manifest import TARGETS, TensorSpec, Verification
from topw_deploy.sampling import as_float32
from topw_deploy.sampling.beta import depends_on_temperature
from topw_deploy.sampling.parameters import PRESETS, TopWOptions, TopWParameters, preset_values
from topw_deploy.sampling.rules import RULES, carried_rules
from topw_deploy.text import parse_size

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int4": "float32", "int8": "float32"}
"""Values of the option dtype -> torch's type of the traced weights; int4 and int8 are quantised after the trace."""
COMPUTE_DTYPES = ("fp32", "fp16")
DTYPE_ALIASES = {"f32": "fp32", "float32": "fp32", "f16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
DEFAULT_OPSET = 23
KV_REQUESTS = ("static", "concat")


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of the decoder's graph. None means the default, and is the only value for an ONNX decoder.

    target: `onnxruntime` (default) or `tensorrt`.
    opset: 23 or 24; default 23, but 24 for tensorrt's static cache.
    kv: `static` or `concat` cache; default static where it is supported.
    max_length: number of slots of tensorrt's static cache, a multiple of 64; default the model's context, at most
        4,096. 0: chosen at run time, which only onnxruntime supports.
    window_cache: whether layers with a sliding window keep only its tokens in onnxruntime's static cache; default True.
    num_hidden_layers: export only this many first layers.
    Raises ParameterError for invalid values or combinations.
    """

    target: str | None = None
    opset: int | None = None
    kv: str | None = None
    max_length: int | None = None
    window_cache: bool | None = None
    num_hidden_layers: int | None = None

    def __post_init__(self) -> None:
        if self.opset is not None and not 23 <= self.opset <= 24:
            raise ParameterError(
                f"opset is {self.opset}, but must be 23 or 24: older opsets have no Attention operator.", "opset"
            )
        if self.kv is not None and self.kv not in KV_REQUESTS:
            raise ParameterError(f"kv is {self.kv!r}, but must be one of {', '.join(KV_REQUESTS)}.", "kv")
        if self.target is not None and self.target not in TARGETS:
            raise ParameterError(f"target is {self.target!r}, but must be one of {', '.join(TARGETS)}.", "target")
        if self.target == "tensorrt" and self.kv != "concat" and self.opset == 23:
            raise ParameterError(
                "opset is 23, but tensorrt's static cache uses TensorScatter, which needs 24; leave --opset out.",
                "opset",
            )
        if self.max_length is not None and (self.target != "tensorrt" or self.kv == "concat"):
            raise ParameterError(
                "max_length is the length of tensorrt's static cache; leave it out for other targets and caches.",
                "max_length",
            )
        if self.window_cache and (self.target == "tensorrt" or self.kv == "concat"):
            raise ParameterError(
                "window_cache is for onnxruntime's static cache; leave it out for other targets and caches.",
                "window_cache",
            )
        if self.max_length is not None and (self.max_length < 0 or self.max_length % 64):
            raise ParameterError(
                f"max_length is {self.max_length}, but must be a multiple of 64, or 0 to choose it at run time.",
                "max_length",
            )
        if self.num_hidden_layers is not None and self.num_hidden_layers < 1:
            raise ParameterError(
                f"num_hidden_layers is {self.num_hidden_layers}, but must be an integer >= 1.", "num_hidden_layers"
            )


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Options of the weights and their files. None means the default.

    dtype: fp32 (default), fp16, bf16, int4 or int8.
    compute_dtype: type of the values that are not quantised, fp32 (default) or fp16; for int4 and int8 only.
    block_size to exclude_nodes: see `quantise.Quantisation`.
    max_shard_size: the largest size of a data file, in bytes or as "2GB" or "2GiB"; None for one file of any size.
    hard_link: whether to hard-link an ONNX decoder's data files instead of copying them.
    Raises ParameterError for invalid values, and for quantisation options with another dtype.
    """

    dtype: str | None = None
    compute_dtype: str | None = None
    block_size: int | None = None
    table_bits: int | None = None
    symmetric: bool | None = None
    accuracy_level: int | None = None
    quantisation_algorithm: str | None = None
    exclude_nodes: tuple[str, ...] = ()
    max_shard_size: int | str | None = None
    hard_link: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ParameterError(f"dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}.", "dtype")
        if self.compute_dtype is not None and self.compute_dtype not in COMPUTE_DTYPES:
            raise ParameterError(
                f"compute_dtype is {self.compute_dtype!r}, but must be one of {', '.join(COMPUTE_DTYPES)}.",
                "compute_dtype",
            )
        _ = self.shard_bytes, self.quantisation  # each raises for invalid values

    @property
    def shard_bytes(self) -> int | None:
        """max_shard_size in bytes."""
        return None if self.max_shard_size is None else parse_size(self.max_shard_size, "max_shard_size")

    @property
    def torch_dtype(self) -> str:
        """Torch's name of the type in which the model is traced."""
        return DTYPES[self.compute_dtype or self.dtype or "fp32"]

    @property
    def quantisation(self) -> Quantisation | None:
        """The options of quantisation; None for a floating-point dtype."""
        options = {
            "block_size": self.block_size,
            "table_bits": self.table_bits,
            "symmetric": self.symmetric,
            "accuracy_level": self.accuracy_level,
            "algorithm": self.quantisation_algorithm,
            "exclude": tuple(self.exclude_nodes) or None,
        }
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if self.dtype in DTYPE_BITS:
            return Quantisation(bits=DTYPE_BITS[self.dtype], **given)
        if self.compute_dtype is not None:
            given = {"compute_dtype": self.compute_dtype, **given}
        if given:
            raise ParameterError(
                f"{next(iter(given))} is an option for quantised weights, but dtype is {self.dtype or 'fp32'}; "
                "give --dtype int4 or int8, or leave the option out.",
                next(iter(given)),
            )
        return None


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """Options of the sampler.

    options: Top-W's options, which are fixed in the graph.
    defaults: the default parameters of generation.
    default_beta: a default `beta` that depends on the temperature, as text; "" for the number in `defaults`.
    branches: whether the function skips work by branches (`If`); without, it has no control flow.
    with_logits, with_mass, with_keep_mask: whether the graph has these outputs.
    neighbour_bound: whether to store each token's distance to its nearest neighbour.
    rules: names of the sampling rules that the function has besides Top-W. Default: all.
    Raises ParameterError for an unknown rule, for defaults outside float32, for a default_beta that does not
    depend on the temperature, and for a bound with the uniform metric.
    """

    options: TopWOptions = field(default_factory=TopWOptions)
    defaults: TopWParameters = field(default_factory=TopWParameters)
    default_beta: str = ""
    branches: bool = True
    with_logits: bool = False
    with_mass: bool = False
    with_keep_mask: bool = False
    neighbour_bound: bool = False
    rules: tuple[str, ...] = tuple(RULES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", carried_rules(self.rules))
        if self.default_beta and not depends_on_temperature(self.default_beta):
            raise ParameterError(
                f"default_beta is {self.default_beta!r}, which does not depend on the temperature; give it as beta of "
                "the defaults.",
                "default_beta",
            )
        if self.default_beta:
            parameters = {**dataclasses.asdict(self.defaults), "beta": self.default_beta}
            object.__setattr__(self, "defaults", TopWParameters(**parameters))
        as_float32(self.defaults)
        if self.neighbour_bound and self.options.metric == "uniform":
            raise ParameterError(
                "the uniform metric has no neighbour bound to store; leave --neighbour-bound out.", "neighbour_bound"
            )


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A request for one export.

    model: a hub id, a folder, an ONNX file or `demo`.
    output: the folder to write.
    tokenizer: folder with the tokenizer and the configuration, if the model's own lacks them.
    resume: continue an interrupted export of the same request; if it is interrupted again, keep its files.
    dry_run: write nothing, and only report sizes and memory.
    overwrite: replace an earlier export in `output`.
    verify: compare the graph with the model before the folder appears.
    keep_failed: keep the files of a failed export in `output`.failed.
    Raises ParameterError for quantised weights with target tensorrt.
    """

    model: str
    output: Path
    hub: HubOptions = field(default_factory=HubOptions)
    graph: GraphOptions = field(default_factory=GraphOptions)
    weights: WeightOptions = field(default_factory=WeightOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    tokenizer: Path | None = None
    resume: bool = False
    dry_run: bool = False
    overwrite: bool = False
    verify: bool = True
    keep_failed: bool = False

    def __post_init__(self) -> None:
        if self.weights.quantisation is not None and self.graph.target == "tensorrt":
            raise ParameterError(
                f"dtype is {self.weights.dtype}, but target tensorrt has no operator for quantised weights "
                "(MatMulNBits); export as fp16 or fp32.",
                "dtype",
            )

    def check_for_onnx(self, file: str) -> None:
        """Raise ParameterError for options that do not apply to the existing ONNX decoder `file`."""
        traced = {
            "dtype": self.weights.dtype,
            "compute_dtype": self.weights.compute_dtype,
            **dataclasses.asdict(self.graph),
            "max_shard_size": self.weights.max_shard_size,
        }
        for name, value in traced.items():
            if value is not None:
                raise ParameterError(
                    f"{name} is {value!r}, but {file} is already an ONNX decoder; leave "
                    f"--{name.replace('_', '-')} out or export from the original model.",
                    name,
                )


Request = TypeVar("Request")
_GROUPS: dict[str, Any] = {
    "hub": HubOptions,
    "graph": GraphOptions,
    "weights": WeightOptions,
    "sampler": SamplerOptions,
}


def export_request(**values: Any) -> ExportRequest:
    """An ExportRequest whose groups of options get their values from flat keywords."""
    return build_request(ExportRequest, values)


def build_request(kind: type[Request], values: dict[str, Any]) -> Request:
    """A request of class `kind`, whose fields in `_GROUPS` get their values from flat `values`."""
    values = dict(values)
    for name in [f.name for f in dataclasses.fields(kind) if f.name in _GROUPS]:  # type: ignore[arg-type]
        names = {f.name for f in dataclasses.fields(_GROUPS[name])} & values.keys()
        values[name] = _GROUPS[name](**{name: values.pop(name) for name in names})
    return kind(**values)


def with_preset(preset: str, parameters: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The fields `options`, `defaults` and `default_beta` of SamplerOptions for a preset.

    parameters, options: replace values of the preset.
    Raises ParameterError for an unknown preset and for a value out of range.
    """
    if preset not in PRESETS:
        raise ParameterError(f"preset is {preset!r}, but must be one of {', '.join(PRESETS)}.", "preset")
    stated = {**preset_values(preset), **parameters}
    beta = stated["beta"]
    return {
        "options": dataclasses.replace(PRESETS[preset][1], **options),
        "defaults": TopWParameters(**stated),
        "default_beta": beta.strip() if depends_on_temperature(beta) else "",
    }


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export or a dry run.

    output: the folder.
    model_type: of the decoder's configuration, or what the sampler was made of.
    nodes: number of nodes in the main graph.
    weight_bytes: size of all weights.
    file_bytes: size of all files.
    files: their names.
    seconds: duration of the export.
    notices: sentences for the user.
    sizes: file -> bytes.
    memory: stage (graph, writing, verification) -> peak resident bytes, estimated in a dry run.
    states: see `DecoderInfo.state_bytes`.
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
    states: dict[str, tuple[int, int]] = field(default_factory=dict)

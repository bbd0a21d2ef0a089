"""The options of an export: what a caller can give, and their checked values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from topw_deploy.errors import ParameterError
from topw_deploy.export.quantise.rounding import DTYPE_BITS, Quantisation
from topw_deploy.export.source.resolve import HubKeywords
from topw_deploy.manifest import TARGETS, TensorSpec, Verification
from topw_deploy.sampling import as_float32
from topw_deploy.sampling.parameters import (
    OPTION_NAMES,
    PARAMETER_NAMES,
    PRESETS,
    TopWOptions,
    TopWParameters,
    depends_on_temperature,
    preset_values,
    unknown_name,
)
from topw_deploy.sampling.rules import RULES, carried_rules
from topw_deploy.text import parse_size

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int4": "float32", "int8": "float32"}
"""Values of the option dtype -> torch's type of the traced weights; int4 and int8 are quantised after the trace."""
COMPUTE_DTYPES = ("fp32", "fp16")
DTYPE_ALIASES = {"f32": "fp32", "float32": "fp32", "f16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
DEFAULT_OPSET = 23
KV_REQUESTS = ("static", "concat")


class SamplerKeywords(HubKeywords, total=False):
    """The options of `export_sampler` and `export_model`; None means the default. See `SamplerOptions`.

    preset: a name in PRESETS, whose values the following options replace.
    lam to geom_scale: the default parameters of generation, see `TopWParameters`.
    top_m to knn_k: Top-W's options, which are fixed in the graph, see `TopWOptions`.
    """

    preset: str | None
    lam: float | None
    beta: float | str | None
    temperature: float | None
    selection_temperature: float | None
    init_top_p: float | None
    geom_scale: float | None
    top_m: int | None
    alt_iters: int | None
    metric: str | None
    potential: str | None
    knn_k: int | None
    branches: bool
    rules: Sequence[str] | None
    with_mass: bool
    with_keep_mask: bool
    neighbour_bound: bool
    opset: int | None
    overwrite: bool
    verify: bool
    dry_run: bool


class ExportKeywords(SamplerKeywords, total=False):
    """The options of `export_model`, named as on the command line; None means the default. See `ExportOptions`."""

    dtype: str | None
    compute_dtype: str | None
    block_size: int | None
    table_bits: int | None
    symmetric: bool | None
    accuracy_level: int | None
    exclude_nodes: Sequence[str]
    target: str | None
    kv: str | None
    max_length: int | None
    window_cache: bool | None
    num_hidden_layers: int | None
    max_shard_size: int | str | None
    hard_link: bool
    with_logits: bool
    tokenizer: str | Path | None
    keep_failed: bool


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """The options that exports with and without a decoder share.

    top_w: Top-W's options, which are fixed in the graph.
    defaults: the default parameters of generation.
    default_beta: a default `beta` that depends on the temperature, as text; "" for the number in `defaults`.
    branches: whether the function skips work by branches (`If`); without, it has no control flow.
    rules: names of the sampling rules that the function has besides Top-W. Default: all.
    with_mass, with_keep_mask: whether the graph has these outputs.
    neighbour_bound: whether to store each token's distance to its nearest neighbour.
    opset: version of the standard operators; None for the default.
    overwrite: replace an earlier export.
    verify: compare the graph with its source before the folder appears.
    dry_run: write nothing, and only report sizes and memory.
    Raises ParameterError for defaults outside float32, and for a bound with the uniform
    metric.
    """

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | None = None
    local_files_only: bool = False
    trust_remote_code: bool = False
    top_w: TopWOptions = field(default_factory=TopWOptions)
    defaults: TopWParameters = field(default_factory=TopWParameters)
    default_beta: str = ""
    branches: bool = True
    rules: tuple[str, ...] = tuple(RULES)
    with_mass: bool = False
    with_keep_mask: bool = False
    neighbour_bound: bool = False
    opset: int | None = None
    overwrite: bool = False
    verify: bool = True
    dry_run: bool = False

    def __post_init__(self) -> None:
        as_float32(self.defaults)
        if self.neighbour_bound and self.top_w.metric == "uniform":
            raise ParameterError(
                "the uniform metric has no neighbour bound to store; leave --neighbour-bound out.", "neighbour_bound"
            )

    @property
    def hub(self) -> HubKeywords:
        """How to access the hub."""
        return {
            "revision": self.revision,
            "cache_dir": self.cache_dir,
            "token": self.token,
            "local_files_only": self.local_files_only,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SamplerOptions):
    """The options of an export of a model. None means the default, and is the only value of some for an ONNX decoder.

    dtype: fp32 (default), fp16, bf16, int4 or int8.
    compute_dtype: type of the values that are not quantised, fp32 (default) or fp16; for int4 and int8 only.
    block_size to exclude_nodes: see `quantise.Quantisation`.
    target: `onnxruntime` (default) or `tensorrt`.
    opset: 23 or 24; default 23, but 24 for tensorrt's static cache.
    kv: `static` or `concat` cache; default static where it is supported.
    max_length: number of slots of tensorrt's static cache, a multiple of 64; default the model's context, at most
        4,096. 0: chosen at run time, which only onnxruntime supports.
    window_cache: whether layers with a sliding window keep only its tokens in onnxruntime's static cache; default True.
    num_hidden_layers: export only this many first layers.
    max_shard_size: the largest size of a data file, in bytes or as "2GB" or "2GiB"; None for one file of any size.
    hard_link: whether to hard-link an ONNX decoder's data files instead of copying them.
    with_logits: whether the graph has the output `logits`.
    tokenizer: folder with the tokenizer and the configuration, if the model's own lacks them.
    keep_failed: keep the files of a failed export in `OUT.failed`.
    Raises ParameterError for invalid values and combinations.
    """

    dtype: str | None = None
    compute_dtype: str | None = None
    block_size: int | None = None
    table_bits: int | None = None
    symmetric: bool | None = None
    accuracy_level: int | None = None
    exclude_nodes: tuple[str, ...] = ()
    target: str | None = None
    kv: str | None = None
    max_length: int | None = None
    window_cache: bool | None = None
    num_hidden_layers: int | None = None
    max_shard_size: int | str | None = None
    hard_link: bool = False
    with_logits: bool = False
    tokenizer: str | Path | None = None
    keep_failed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _require_choice("kv", self.kv, KV_REQUESTS)
        _require_choice("target", self.target, TARGETS)
        self._check_graph()
        if self.quantisation is not None and self.target == "tensorrt":
            raise ParameterError(
                f"dtype is {self.dtype}, but target tensorrt has no operator for quantised weights (MatMulNBits); "
                "export as fp16 or fp32.",
                "dtype",
            )
        _ = self.shard_bytes  # raises for invalid values

    def _check_graph(self) -> None:
        if self.opset is not None and not 23 <= self.opset <= 24:
            raise ParameterError(
                f"opset is {self.opset}, but must be 23 or 24: older opsets have no Attention operator.", "opset"
            )
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
            "exclude": self.exclude_nodes or None,
        }
        chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if self.dtype in DTYPE_BITS:
            return Quantisation(bits=DTYPE_BITS[self.dtype], **chosen)
        if self.compute_dtype is not None:
            chosen = {"compute_dtype": self.compute_dtype, **chosen}
        if chosen:
            raise ParameterError(
                f"{next(iter(chosen))} is an option for quantised weights, but dtype is {self.dtype or 'fp32'}; "
                "give --dtype int4 or int8, or leave the option out.",
                next(iter(chosen)),
            )
        return None

    def check_for_onnx(self, file: str) -> None:
        """Raise ParameterError for options that do not apply to the existing ONNX decoder `file`."""
        for name in _TRACED_ONLY:
            value = getattr(self, name)
            if value is not None:
                raise ParameterError(
                    f"{name} is {value!r}, but {file} is already an ONNX decoder; leave "
                    f"--{name.replace('_', '-')} out or export from the original model.",
                    name,
                )


_TRACED_ONLY = (
    *("dtype", "compute_dtype", "target", "opset", "kv", "max_length", "window_cache", "num_hidden_layers"),
    "max_shard_size",
)
Options = TypeVar("Options", bound=SamplerOptions)


def read_options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """Return the options of class `kind` for keywords of `export_model` or `export_sampler`.

    Raises ParameterError for an unknown name, preset or rule, and for values that `kind` refuses.
    """
    values = {name: value for name, value in given.items() if value is not None}
    parameters = {name: values.pop(name) for name in PARAMETER_NAMES if name in values}
    baked = {name: values.pop(name) for name in OPTION_NAMES if name in values}
    preset = values.pop("preset", "paper")
    _require_choice("preset", preset, PRESETS)
    known = [each.name for each in fields(kind) if each.name not in ("top_w", "defaults", "default_beta")]
    for name in values:
        if name not in known:
            raise unknown_name(name, [*known, *PARAMETER_NAMES, *OPTION_NAMES, "preset"])
    parameters = {**preset_values(preset), **parameters}
    beta = parameters["beta"]
    if "dtype" in values:
        values["dtype"] = DTYPE_ALIASES.get(values["dtype"], values["dtype"])
    if "exclude_nodes" in values:
        values["exclude_nodes"] = tuple(values["exclude_nodes"])
    return kind(
        **{**values, "rules": carried_rules(values.get("rules", RULES))},
        top_w=replace(PRESETS[preset][1], **baked),
        defaults=TopWParameters(**parameters),
        default_beta=beta.strip() if depends_on_temperature(beta) else "",
    )


def _require_choice(name: str, value: Any, choices: Any) -> None:
    if value is not None and value not in choices:
        raise ParameterError(f"{name} is {value!r}, but must be one of {', '.join(choices)}.", name)


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

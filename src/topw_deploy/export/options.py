"""The options of an export: what a caller can give, and their checked values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from topw_deploy.errors import ParameterError
from topw_deploy.export.quantise.rounding import DTYPE_BITS, NO_CALIBRATION, Quantisation
from topw_deploy.export.source.quantised import QuantisedFormat
from topw_deploy.export.source.resolve import HubKeywords
from topw_deploy.manifest import TARGETS, TensorSpec, Verification
from topw_deploy.sampling import as_float32
from topw_deploy.sampling.parameters import (
    LIVELY,
    OPTION_NAMES,
    PARAMETER_NAMES,
    PRESETS,
    TopWOptions,
    TopWParameters,
    depends_on_temperature,
    preset_values,
    typical_distance,
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
_ROUNDING = (
    *("block_size", "table_bits", "symmetric", "accuracy_level", "exclude_nodes"),
    *("calibration", "average_bits"),
)


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
    calibration: str | Path | None
    average_bits: float | None
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

    keywords: the names and types of the options that a caller gives.
    hub: how to access the hub.
    top_w: Top-W's options, which are fixed in the graph.
    defaults: the default parameters of generation.
    default_beta: a default `beta` that depends on the temperature, as text; "" for the number in `defaults`.
    is_lively: whether the geom_scale of `defaults` is the one of `lively`, per typical distance.
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

    keywords: ClassVar[type] = SamplerKeywords
    hub: HubKeywords = field(default_factory=HubKeywords)
    top_w: TopWOptions = field(default_factory=TopWOptions)
    defaults: TopWParameters = field(default_factory=TopWParameters)
    default_beta: str = ""
    is_lively: bool = False
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
        refuse(
            self.neighbour_bound and self.top_w.metric == "uniform",
            "neighbour_bound stores distances, but the uniform metric has none; leave --neighbour-bound out.",
        )

    def defaults_for(self, metric: str, width: int | None) -> TopWParameters:
        """The defaults of an export with this metric and width of the embeddings."""
        unit = typical_distance(metric, width) if self.is_lively else 1.0
        return replace(self.defaults, geom_scale=self.defaults.geom_scale / unit)

    @property
    def trust_remote_code(self) -> bool:
        """Whether to run a model's own Python code."""
        return self.hub.get("trust_remote_code", False)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(SamplerOptions):
    """The options of an export of a model. None means the default, and is the only value of some for an ONNX decoder.

    dtype: fp32 (default), fp16, bf16, int4 or int8.
    compute_dtype: type of the values that are not quantised, fp32 (default) or fp16; for int4 and int8 only.
    quantisation: how weights are rounded; None for a floating-point dtype.
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

    keywords: ClassVar[type] = ExportKeywords
    dtype: str | None = None
    compute_dtype: str | None = None
    quantisation: Quantisation | None = None
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
        choices = {"dtype": DTYPES, "compute_dtype": COMPUTE_DTYPES, "kv": KV_REQUESTS, "target": TARGETS}
        for name, known in choices.items():
            _require_choice(name, getattr(self, name), known)
        static, opset, most, layers = self.kv != "concat", self.opset, self.max_length, self.num_hidden_layers
        tensorrt, elsewhere = self.target == "tensorrt", "leave it out for other targets and caches."
        refuse(
            opset is not None and not 23 <= opset <= 24,
            f"opset is {opset}, but must be 23 or 24: older opsets have no Attention operator.",
        )
        refuse(
            tensorrt and static and opset == 23,
            "opset is 23, but tensorrt's static cache uses TensorScatter, which needs 24; leave --opset out.",
        )
        refuse(
            most is not None and not (tensorrt and static),
            f"max_length is the length of tensorrt's static cache; {elsewhere}",
        )
        refuse(
            bool(self.window_cache) and (tensorrt or not static),
            f"window_cache is for onnxruntime's static cache; {elsewhere}",
        )
        refuse(
            most is not None and (most < 0 or most % 64 != 0),
            f"max_length is {most}, but must be a multiple of 64, or 0 to choose it at run time.",
        )
        refuse(layers is not None and layers < 1, f"num_hidden_layers is {layers}, but must be an integer >= 1.")
        refuse(
            tensorrt and self.quantisation is not None and not self.quantisation.symmetric,
            "symmetric is False, but TensorRT multiplies symmetric codes alone; leave --asymmetric out.",
        )
        _ = self.shard_bytes  # raises for invalid values

    @property
    def shard_bytes(self) -> int | None:
        """max_shard_size in bytes."""
        return None if self.max_shard_size is None else parse_size(self.max_shard_size, "max_shard_size")

    @property
    def torch_dtype(self) -> str:
        """Torch's name of the type in which the model is traced."""
        return DTYPES[self.compute_dtype or self.dtype or "fp32"]

    def for_checkpoint(self, stored: QuantisedFormat | None) -> ExportOptions:
        """The options for a checkpoint whose weights are `stored`: without a dtype, a GGUF file's codes are kept."""
        is_open = (self.dtype, self.compute_dtype, self.target in (None, TARGETS[0])) == (None, None, True)
        if stored is None or stored.gguf is None or not stored.integers or not is_open:
            return self
        return replace(self, quantisation=Quantisation(bits=8, block_size=32))

    def check_for_checkpoint(self, name: str, stored: QuantisedFormat | None) -> None:
        """Raise ParameterError for options that do not apply to the checkpoint `name`, whose weights are `stored`."""
        keeps_codes = self.quantisation is not None and stored is not None and stored.integers and not stored.gguf
        refuse(
            self.hard_link,
            "hard_link shares the data files of an ONNX decoder, but this model is a checkpoint, whose weights are "
            "written anew; leave --hard-link out.",
        )
        refuse(
            keeps_codes and self.torch_dtype != "float32",
            f"compute_dtype is {self.compute_dtype!r}, but {name} holds {stored and stored.name} codes, which can "
            "be kept only with compute_dtype 'fp32'; leave --compute-dtype out.",
        )

    def check_for_onnx(self, file: str) -> None:
        """Raise ParameterError for options that do not apply to the existing ONNX decoder `file`."""
        traced = ("dtype", "compute_dtype", "target", "opset", "kv", "max_length", "window_cache", "num_hidden_layers")
        for name in (*traced, "max_shard_size"):
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            why = f"{name} is {value!r}, but {file} is already an ONNX decoder; leave {option} out or export from the"
            refuse(value is not None, f"{why} original model.")


Options = TypeVar("Options", bound=SamplerOptions)


def read_options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """Return the options of class `kind` for keywords of `export_model` or `export_sampler`.

    Raises ParameterError for an unknown name, preset or rule, and for values that `kind` refuses.
    """
    values = {name: value for name, value in given.items() if value is not None}
    known = list(kind.keywords.__annotations__)
    for name in values:
        if name not in known:
            raise unknown_name(name, known)

    def take(names: Iterable[str]) -> dict[str, Any]:
        return {name: values.pop(name) for name in names if name in values}

    hub, parameters, baked = take(HubKeywords.__annotations__), take(PARAMETER_NAMES), take(OPTION_NAMES)
    preset = values.pop("preset", "paper")
    _require_choice("preset", preset, PRESETS)
    is_lively = preset == LIVELY and "geom_scale" not in parameters
    parameters = {**preset_values(preset), **parameters}
    beta = parameters["beta"]
    if "dtype" in values:
        values["dtype"] = DTYPE_ALIASES.get(values["dtype"], values["dtype"])
    if issubclass(kind, ExportOptions):
        values["quantisation"] = _read_quantisation(values, take(_ROUNDING))
    return kind(
        **{**values, "rules": carried_rules(values.get("rules", RULES))},
        hub=cast("HubKeywords", hub),
        top_w=replace(PRESETS[preset][1], **baked),
        defaults=TopWParameters(**parameters),
        default_beta=beta.strip() if depends_on_temperature(beta) else "",
        is_lively=is_lively,
    )


def _read_quantisation(values: Mapping[str, Any], rounding: dict[str, Any]) -> Quantisation | None:
    """The options of quantisation; None for a floating-point dtype, with which none may be given."""
    dtype, exclude = values.get("dtype", "fp32"), tuple(rounding.pop("exclude_nodes", ()))
    for name in ("calibration", "average_bits"):
        refuse(name in rounding and dtype == "int8", f"{name} is for 4-bit weights, but dtype is int8; leave it out.")
    if "calibration" in rounding:
        rounding["calibration"] = str(rounding["calibration"])
    refuse(
        "average_bits" in rounding and rounding.get("calibration") == NO_CALIBRATION,
        "average_bits needs errors measured on a text, but calibration is 'none'; leave one of them out.",
    )
    if dtype in DTYPE_BITS:
        if values.get("target") == "tensorrt":
            rounding = {"symmetric": True, **rounding, "positive": True}
        return Quantisation(bits=DTYPE_BITS[dtype], exclude=exclude, **rounding)
    given = {**values, **rounding, "exclude_nodes": exclude}
    advice = "give --dtype int4 or int8, or leave the option out"
    for name in ("compute_dtype", *_ROUNDING):
        why = f"{name} is an option for quantised weights, but dtype is {dtype}"
        refuse(given.get(name, ()) != (), f"{why}; {advice}.")
    return None


def refuse(is_wrong: bool, message: str) -> None:
    """Raise ParameterError if `is_wrong`. message: its first word is the option's name."""
    if is_wrong:
        raise ParameterError(message, message.partition(" ")[0])


def _require_choice(name: str, value: Any, choices: Any) -> None:
    wrong = value is not None and value not in choices
    refuse(wrong, f"{name} is {value!r}, but must be one of {', '.join(choices)}.")


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

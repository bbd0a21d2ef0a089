"""Read checkpoints of quantised weights with NumPy (docs/guide/quantisation.md).

A linear layer [outputs, inputs] of integer codes has a scale and a zero point for each output and group of inputs:
weight = (code - zero point) * scale.

GPTQ:
    qweight: int32 [inputs * bits / 32, outputs]; a word holds consecutive inputs.
    qzeros: int32 [groups, outputs * bits / 32]; a word holds consecutive outputs, each minus one in version 1.
    scales: float16 [groups, outputs].
    g_idx: int32 [inputs], the group of each input; if absent, groups are consecutive inputs.
AWQ (`version: gemm`):
    qweight: int32 [inputs, outputs / 8]; a word holds 8 outputs in the order _AWQ_ORDER.
    qzeros: int32 [groups, outputs / 8], packed like qweight.
    scales: float16 [groups, outputs].
compressed-tensors has one of:
    weight_packed (pack-quantized): int32 [outputs, inputs * bits / 32], consecutive inputs, lowest bits first, each
        code plus 2 ** (bits - 1); weight_shape: [2].
    weight (int-quantized, naive-quantized): int8 [outputs, inputs].
    weight (float-quantized): float8, see below.
  and for integers:
    weight_scale: [outputs, groups], [outputs], or one value for the whole layer.
    weight_zero_point: int8 [outputs, groups], or packed like codes along outputs; absent if symmetric.
    weight_g_idx: int32 [inputs], the group of each input; absent, or all -1, if groups are consecutive inputs.
Float8: the scales of a weight `NAME` are in `NAME_scale_inv` (DeepSeek, Qwen3 and Ministral 3) or `NAME_scale`
    (compressed-tensors, FBGEMM, ModelOpt), or in a tensor whose name ends with `.scale` or `.qscale_weight` instead of
    `.weight`. A weight is its float8 value times the scale of its block. A scale of type U8 or F8_E8M0 is a power of
    two: 2 ** (byte - 127).
MXFP4 experts of gpt-oss:
    `NAME_blocks`: U8 [experts, outputs, blocks, 16], two E2M1 values a byte, the low half byte first.
    `NAME_scales`: U8 [experts, outputs, blocks], a scale 2 ** (byte - 127) for the 32 values of a block.
    The decoded weight `NAME` is [experts, inputs, outputs], with 32 * blocks inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.files import (
    NUMPY_TYPES,
    EncodedWeight,
    IntegerMatrix,
    IntegerWeight,
    Rows,
    StoredTensor,
    gguf_path,
    json_object,
    read_json,
    stored_tensors,
    text_part,
    unpack_words,
)
from topw_deploy.export.source.gguf import GgufFile, checkpoint_tensors, read_gguf

_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_FLOAT8_METHODS = ("fp8", "fbgemm_fp8", "modelopt")
_EXPONENT_TYPES = ("U8", "F8_E8M0")
_NOT_A_NUMBER = 255  # as an exponent
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")  # of compressed-tensors
_FORMATS = (*_INTEGER_FORMATS, "float-quantized", "mixed-precision", "dense")
_VERSION_NAMES = ("checkpoint_format", "format")  # of a GPTQ checkpoint; transformers prefers the first
_GPTQ_VERSIONS = ("gptq", "gptq_v2")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each half byte of a word holds, lowest half byte first
_MXFP4_BYTES = 16  # of a block
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)  # the highest bit is the sign
_SUPPORTED = (
    "GPTQ of 4 and 8 bits, AWQ of 4 bits (gemm), FP8, MXFP4, and compressed-tensors of integers of 4 and 8 bits or "
    "floats of 8"
)

Parts = dict[str, StoredTensor]
"""The tensors of a weight: the end of each tensor's name -> the tensor."""


@dataclass(frozen=True)
class QuantisedFormat:
    """How a checkpoint's weights are quantised, as its configuration states.

    name: the format's name in messages.
    settings: the configuration's quantization_config.
    integers: whether the weights are integer codes, which a quantised export can keep.
    gguf: the header of the GGUF file that holds them, if they are in one.
    """

    name: str
    settings: dict[str, Any]
    integers: bool
    gguf: GgufFile | None = None

    @property
    def blocks(self) -> tuple[int, int] | None:
        """The block size (rows, columns) of float8 weights that have a scale per block, else None."""
        groups = (json_object(group.get("weights")) for group in _groups(self.settings))
        for found in (self.settings.get("weight_block_size"), *(group.get("block_structure") for group in groups)):
            if isinstance(found, list) and [type(size) for size in found] == [int, int]:
                return found[0], found[1]
        return None


class QuantisedCheckpoint:
    """The tensors of the checkpoint in `folder`, whose weights are quantised.

    kind: the checkpoint's format.
    weights: name -> quantised weight, which is decoded to float32 when it is read.
    parts: name -> names of the tensors that the quantised weight is decoded from.
    tensors: the quantised weights and all other tensors, by name.
    Raises SourceError for missing tensors, wrong types or shapes, and zero points that contradict the configuration.
    """

    def __init__(self, folder: Path, kind: QuantisedFormat) -> None:
        self.kind = kind
        if kind.gguf is not None:
            self.tensors: dict[str, StoredTensor | EncodedWeight] = checkpoint_tensors(kind.gguf)
            self.weights = {name: each for name, each in self.tensors.items() if isinstance(each, EncodedWeight)}
            self.parts: dict[str, set[str]] = {}
            return
        stored = stored_tensors(folder)
        encoded = _encoded_weights(kind, stored)
        self.parts = {name: parts for name, (_, parts) in encoded.items()}
        used = set().union(*self.parts.values())
        self.weights = {name: weight for name, (weight, _) in encoded.items()}
        others = {name: tensor for name, tensor in stored.items() if name not in used}
        self.tensors = {**others, **self.weights}
        _check_symmetry((each for each in self.weights.values() if isinstance(each, PackedWeight)), folder)

    @classmethod
    def of(cls, folder: Path) -> QuantisedCheckpoint | None:
        """Open the checkpoint in `folder`; None if its weights are not quantised."""
        kind = quantised_format(folder)
        return cls(folder, kind) if kind is not None else None


def quantised_format(folder: Path) -> QuantisedFormat | None:
    """Return how the checkpoint in `folder` is quantised; None for ordinary weights.

    Raises UnsupportedModelError for unsupported quantisation, SourceError for a damaged configuration.
    """
    path = gguf_path(folder)
    if path is not None:
        file = read_gguf(path)
        return QuantisedFormat("GGUF", {}, integers=file.is_quantised, gguf=file)
    config = read_json(folder / "config.json")
    parts = [config, text_part(config)]
    stated = [part.get(name) for part in parts for name in ("quantization_config", "compression_config")]
    settings = next((found for found in (*stated, _modelopt_settings(folder)) if found is not None), None)
    if settings is None:
        return None
    settings = json_object(settings)
    method = str(settings.get("quant_method", "")).lower()
    how = _described(method, settings)
    if _packed_bits(settings) is not None:
        return QuantisedFormat(method.upper(), settings, integers=True)
    if method == "compressed-tensors":
        named = [settings.get("format"), *(group.get("format") for group in _groups(settings))]
        formats = {str(name) for name in named if name is not None} or {"dense"}
        sparse = str(json_object(settings.get("sparsity_config")).get("format") or "dense")
        others = sorted(formats - set(_FORMATS)) + [sparse] * (sparse != "dense")
        if settings.get("transform_config"):
            others.append("transforms of activations")
        if not others:
            return QuantisedFormat(method, settings, integers=bool(formats & {*_INTEGER_FORMATS, "mixed-precision"}))
        how = f"by {method} as {others[0]}"
    algorithm = str(settings.get("quant_algo") or "fp8").lower()  # only ModelOpt names one, or none for a cache in FP8
    if (method in _FLOAT8_METHODS and algorithm == "fp8") or method == "mxfp4":
        return QuantisedFormat("MXFP4" if method == "mxfp4" else "FP8", settings, integers=False)
    raise UnsupportedModelError(
        f"the checkpoint in {folder} is quantised {how}, but only {_SUPPORTED} are supported; export the unquantised "
        "one."
    )


def _described(method: str, settings: dict[str, Any]) -> str:
    """Return the method of a quantisation and the settings that make it a format of its own, for messages."""
    names = ("bits", "w_bit", "version", "quant_algo", "is_marlin_format", *_VERSION_NAMES)
    stated = [f"{name} {settings[name]!r}" for name in names if settings.get(name)]
    return f"by {method or 'an unnamed method'}" + (f" ({', '.join(stated)})" if stated else "")


def _modelopt_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in the file that ModelOpt writes beside config.json; None if it states no quantisation."""
    settings = json_object(read_json(folder / "hf_quant_config.json").get("quantization"))
    algorithm = settings.get("quant_algo") or settings.get("kv_cache_quant_algo")
    return {"quant_method": "modelopt", **settings, "quant_algo": algorithm} if algorithm else None


def _groups(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of weights of compressed-tensors."""
    return [json_object(group) for group in json_object(settings.get("config_groups")).values()]


def _packed_bits(settings: dict[str, Any]) -> int | None:
    """The bits of GPTQ's or AWQ's codes; None for other formats."""
    method, bits = str(settings.get("quant_method", "")).lower(), settings.get("bits", settings.get("w_bit"))
    is_gptq = method == "gptq" and bits in (4, 8) and _gptq_version(settings) in _GPTQ_VERSIONS
    is_awq = method == "awq" and bits == 4 and str(settings.get("version", "gemm")).lower() == "gemm"
    return bits if is_gptq or is_awq else None


def _gptq_version(settings: dict[str, Any]) -> str:
    """Return how zero points are stored, `gptq` or `gptq_v2`; any other value is the name of another format."""
    stated = (settings[name] for name in _VERSION_NAMES if settings.get(name))
    return "marlin" if settings.get("is_marlin_format") else str(next(stated, "gptq")).lower()


def _encoded_weights(
    kind: QuantisedFormat, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[EncodedWeight, set[str]]]:
    """The quantised weights by name, each with the names of the tensors that hold it."""
    found: dict[str, tuple[EncodedWeight, set[str]]] = {}

    def add(name: str, make: Any, names: Mapping[str, str], *settings: Any) -> None:
        if name in stored and name not in names.values():
            raise SourceError(
                f"the checkpoint holds {name} and also {next(iter(names.values()))}, from which it is decoded; remove "
                "the one that does not belong to the model."
            )
        held = {part: full for part, full in names.items() if full in stored}
        found[name] = make(name, {part: stored[full] for part, full in held.items()}, *settings), set(held.values())

    for full, tensor in stored.items():
        layer, _, end = full.rpartition(".")
        weight = full.removesuffix("_packed")
        if kind.name in ("GPTQ", "AWQ"):
            if end == "qweight":
                names = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
                add(f"{layer}.weight", PackedWeight, names, kind.settings)
        elif kind.name == "MXFP4":
            if full.endswith(("_blocks", "_scales")):
                name = full.removesuffix("_blocks").removesuffix("_scales")
                add(name, Mxfp4Weight, {"blocks": f"{name}_blocks", "scales": f"{name}_scales"})
        elif tensor.dtype in _FLOAT8:
            prefix = full.removesuffix("weight")
            others = [f"{prefix}scale", f"{prefix}qscale_weight"] if end == "weight" else []
            named = (f"{full}_scale_inv", f"{full}_scale", *others)
            scales = next((other for other in named if other in stored), "")
            add(full, ScaledWeight, {"values": full, "scales": scales}, kind.blocks)
        elif kind.name == "compressed-tensors" and (
            full.endswith(".weight_packed") or (end == "weight" and tensor.dtype == "I8")
        ):
            parts = {part: f"{weight}_{part}" for part in ("scale", "zero_point", "g_idx", "shape")}
            add(weight, CompressedWeight, {**parts, "codes": full})
    return found


@contextlib.contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Raise SourceError for tensors of the weight `name` that are missing or do not fit together."""
    try:
        yield
    except KeyError as error:
        raise SourceError(
            f"the checkpoint lacks the {error.args[0]} of {name} by the names of its format; rename the tensor that "
            "holds them, or fetch it again."
        ) from None
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise SourceError(
            f"the weight {name} of the checkpoint is damaged, or stored otherwise than its quantization_config states "
            f"({error}); correct the settings (bits, dynamic, weight_block_size), or fetch it again."
        ) from None


def _array(stored: StoredTensor, *types: str) -> np.ndarray:
    """The values of a tensor of one of these types."""
    if stored.dtype not in types:
        raise ValueError(f"a part is {stored.dtype}, not {' or '.join(types)}")
    return np.asarray(stored.array())


def _input_groups(groups: np.ndarray | None, inputs: int, count: int) -> np.ndarray:
    """The group of each input, int64 [inputs]. groups: as stored; None, or all -1, if they are consecutive inputs."""
    if groups is None or (groups == -1).all():
        return np.arange(inputs) // -(-inputs // count)
    if groups.shape != (inputs,) or groups.min() < 0 or groups.max() >= count:
        raise ValueError(f"its inputs are not in groups 0 to {count - 1}")
    return groups.astype(np.int64)


def _check_symmetry(weights: Iterable[PackedWeight], folder: Path) -> None:
    """Raise SourceError if the stated version of GPTQ contradicts zero points that are symmetric in the other one."""
    for weight in weights:
        if weight.contradicts_symmetry:
            raise SourceError(
                f"the checkpoint in {folder} states sym and checkpoint_format {weight.version!r}, but the zero points "
                f'of {weight.name} are symmetric only in the other version; set "checkpoint_format": '
                f'"{_GPTQ_VERSIONS[weight.version == "gptq"]}" in the quantization_config of its config.json, or '
                '"sym": false if they are right.'
            )


class PackedWeight(IntegerWeight):
    """The weight of a GPTQ or AWQ layer. settings: the quantization_config."""

    def __init__(self, name: str, parts: Parts, settings: dict[str, Any]) -> None:
        self.name, self._parts, self._settings = name, parts, settings
        self._is_gptq = str(settings["quant_method"]).lower() == "gptq"
        self._bits = _packed_bits(settings) or 4
        self.version = _gptq_version(settings)
        with _decoding(name):
            rows, columns = parts["qweight"].shape
            scales, zeros = parts["scales"], parts["qzeros"]
            if self._is_gptq and settings.get("desc_act") and scales.shape[0] > 1:
                parts["g_idx"]  # the groups are not those of consecutive inputs
            if settings.get("dynamic"):  # GPTQModel's other bits for some layers, by patterns of their names
                self._bits = 32 * zeros.shape[1] // columns
        if self._bits not in (4, 8):
            raise UnsupportedModelError(
                f"the weight {name} has {self._bits} bits, but only GPTQ of 4 and 8 bits is supported; export the "
                "unquantised checkpoint."
            )
        per_word = 32 // self._bits
        self.shape = (columns, rows * per_word) if self._is_gptq else (columns * per_word, rows)

    @property
    def contradicts_symmetry(self) -> bool:
        """Whether `sym` is set, but all stored zero points are the middle only in the other version of GPTQ."""
        if not self._is_gptq or self._settings.get("sym") is not True:
            return False
        with _decoding(self.name):
            zeros = unpack_words(_array(self._parts["qzeros"], "I32"), self._bits)
        return zeros.size > 0 and bool((zeros == 2 ** (self._bits - 1) - (self.version == "gptq_v2")).all())

    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        """Return the codes of some rows. Unpacks the whole layer, because outputs share words."""
        with _decoding(self.name):
            words, zeros = (_array(self._parts[part], "I32") for part in ("qweight", "qzeros"))
            scales = _array(self._parts["scales"], "F16", "F32").astype(np.float32).T
            outputs, inputs = self.shape
            if self._is_gptq:
                codes = unpack_words(words.T, self._bits)
                zeros = unpack_words(zeros, self._bits).T.astype(np.int32) + (self.version != "gptq_v2")
            else:
                codes, zeros = _unpack_interleaved(words).T, _unpack_interleaved(zeros).T.astype(np.int32)
            count = scales.shape[1]
            if codes.shape != self.shape or not scales.shape == zeros.shape == (outputs, count):
                raise ValueError(
                    f"codes {codes.shape} of {self._bits} bits, scales {scales.shape}, zero points {zeros.shape}"
                )
            stored = self._parts.get("g_idx")
            groups = _input_groups(None if stored is None else _array(stored, "I32", "I64"), inputs, count)
            codes, scales = np.ascontiguousarray(codes), np.ascontiguousarray(scales)
            return IntegerMatrix(codes[rows], scales[rows], zeros[rows], groups, self._bits)


def _unpack_interleaved(words: np.ndarray) -> np.ndarray:
    """Unpack AWQ's 4-bit codes, int32 [n, m] -> uint8 [n, m * 8], in the order of outputs."""
    unpacked = unpack_words(words, 4).reshape(len(words), -1, 8)
    found = np.empty_like(unpacked)
    found[..., _AWQ_ORDER] = unpacked
    return found.reshape(len(words), -1)


class CompressedWeight(IntegerWeight):
    """The weight of a layer of compressed-tensors' integers."""

    def __init__(self, name: str, parts: Parts) -> None:
        self.name, self._parts, self._bits = name, parts, 8
        with _decoding(name):
            outputs, inputs = _array(parts["codes"], "I32", "I8").shape
            self._packed = parts["codes"].dtype == "I32"
            if self._packed:
                words = inputs
                _, inputs = (int(size) for size in _array(parts["shape"], "I64", "I32").reshape(-1))
                fitting = [bits for bits in (4, 8) if -(-inputs * bits // 32) == words]
                if len(fitting) != 1:
                    raise ValueError(f"{words} words for {inputs} inputs are codes of neither 4 nor 8 bits")
                self._bits = fitting[0]
            self.shape = (outputs, inputs)
            stored, scale = parts.get("g_idx"), parts["scale"]
            self._group_count = scale.shape[1] if len(scale.shape) == 2 else 1
            groups = None if stored is None else _array(stored, "I32", "I64")
            self._groups = _input_groups(groups, inputs, self._group_count)

    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        with _decoding(self.name):
            codes = np.asarray(self._parts["codes"].array()[rows])
            if self._packed:
                codes = unpack_words(codes, self._bits)[:, : self.shape[1]]
            else:
                codes = (codes.astype(np.int16) + 128).astype(np.uint8)
            scales = _array(self._parts["scale"], "F32", "F16", "BF16").astype(np.float32)
            scales, zeros = self._broadcast_rows(scales, rows), self._broadcast_rows(self._zeros(), rows)
            return IntegerMatrix(np.ascontiguousarray(codes), scales, zeros, self._groups, self._bits)

    def _zeros(self) -> np.ndarray:
        middle, stored = 2 ** (self._bits - 1), self._parts.get("zero_point")
        if stored is None:
            return np.full((1, 1), middle, np.int32)
        array = _array(stored, "I8", "I32")
        if stored.dtype == "I32":
            return unpack_words(array.T, self._bits)[:, : self.shape[0]].T.astype(np.int32)
        return array.astype(np.int32) + middle

    def _broadcast_rows(self, array: np.ndarray, rows: Rows) -> np.ndarray:
        """Broadcast `array` to [outputs, groups] and return its `rows`."""
        wide = array.reshape(-1, array.shape[1] if array.ndim == 2 else 1)
        return np.ascontiguousarray(np.broadcast_to(wide, (self.shape[0], self._group_count))[rows])


class ScaledWeight(EncodedWeight):
    """Float8 values with a scale per tensor, row or block.

    blocks: the block size of the last two axes in the configuration; needed if the last block is shorter.
    """

    def __init__(self, name: str, parts: Parts, blocks: tuple[int, int] | None = None) -> None:
        with _decoding(name):
            self.name, self._values = name, parts["values"]
            self.shape = self._values.shape
            stored = parts["scales"]
            if stored.dtype in _EXPONENT_TYPES:
                scales = _power_of_two(np.atleast_1d(stored.array()).view(np.uint8))
            else:
                scales = _array(stored, "F32", "F16", "BF16", "F64").astype(np.float32)
            if not np.isfinite(scales).all():
                raise ValueError("its scales contain NaN or infinity")
            self._axis_indices = _scale_indices(self.shape, scales.shape, blocks)
            self._scales = scales.reshape([int(places.max(initial=0)) + 1 for places in self._axis_indices])

    def rows(self, rows: Rows) -> np.ndarray:
        table = np.arange(256, dtype=np.uint8).view(NUMPY_TYPES[self._values.dtype]).astype(np.float32)
        found = table[np.asarray(self._values.array()[rows]).view(np.uint8)]
        found *= self._scales[np.ix_(self._axis_indices[0][rows], *self._axis_indices[1:])]
        return found


def _power_of_two(exponents: np.ndarray) -> np.ndarray:
    """Return 2 ** (byte - 127) in float32."""
    if (exponents == _NOT_A_NUMBER).any():
        raise ValueError(f"its scales contain the byte {_NOT_A_NUMBER}, which is no number")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def _scale_indices(shape: tuple[int, ...], scales: tuple[int, ...], blocks: tuple[int, int] | None) -> list[np.ndarray]:
    """For each axis of the weight, the index of the scale at each position, int64 [size]."""
    if len(scales) <= 1 < len(shape):  # one scale per row, or one in all
        scales = (*(scales or (1,)), *[1] * (len(shape) - 1))
    if len(scales) == len(shape) - 1:  # one scale per row, without the last axis
        scales = (*scales, 1)
    sizes = [1] * (len(shape) - len(blocks or ())) + list(blocks or ())
    indices = []
    for size, count, block in zip(shape, scales, sizes, strict=True):
        if not (count == 1 or (block > 1 and -(-size // block) == count) or size % count == 0):
            raise ValueError(f"its shape is {shape}, which scales of shape {scales} do not cover")
        step = size if count == 1 else block if block > 1 and -(-size // block) == count else size // count
        indices.append(np.arange(size) // step)
    return indices


class Mxfp4Weight(EncodedWeight):
    """One matrix of all experts of a layer."""

    def __init__(self, name: str, parts: Parts) -> None:
        with _decoding(name):
            blocks, scales = parts["blocks"], parts["scales"]
            experts, outputs, count, size = blocks.shape
            if (*scales.shape, size) != (*blocks.shape[:3], _MXFP4_BYTES) or {blocks.dtype, scales.dtype} != {"U8"}:
                raise ValueError(f"blocks {blocks.dtype} {blocks.shape} and scales {scales.dtype} {scales.shape}")
        self.name, self.shape = name, (experts, count * 2 * _MXFP4_BYTES, outputs)
        self._blocks, self._scales = blocks, scales

    def rows(self, rows: Rows) -> np.ndarray:
        packed = np.asarray(self._blocks.array()[rows])
        with _decoding(self.name):
            scales = _power_of_two(np.asarray(self._scales.array()[rows]))
        values = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis=-1)  # [experts, outputs, blocks, 16, 2]
        values *= scales[..., None, None]
        return np.ascontiguousarray(values.reshape(*packed.shape[:2], -1).swapaxes(1, 2))

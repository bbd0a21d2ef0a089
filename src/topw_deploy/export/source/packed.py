"""Decode checkpoints of integer codes with NumPy (docs/guide/quantisation.md): AutoGPTQ, AutoAWQ, compressed-tensors.

A linear layer [outputs, inputs] has an integer code for each weight, and a scale and a zero point for each output and
group of inputs: weight = (code - zero point) * scale.

GPTQ:
    qweight: int32 [inputs * bits / 32, outputs]; a word holds consecutive inputs.
    qzeros: int32 [groups, outputs * bits / 32]; a word holds consecutive outputs, each minus one in version 1.
    scales: float16 [groups, outputs].
    g_idx: int32 [inputs], the group of each input; if absent, groups are consecutive inputs.
AWQ (`version: gemm`):
    qweight: int32 [inputs, outputs / 8]; a word holds 8 outputs in the order _AWQ_ORDER.
    qzeros: int32 [groups, outputs / 8], packed like qweight.
    scales: float16 [groups, outputs].

compressed-tensors also has 8-bit floats, see scaled.py:

A linear layer [outputs, inputs] has one of:
    weight_packed (pack-quantized): int32 [outputs, inputs * bits / 32], consecutive inputs, lowest bits first, each
        code plus 2 ** (bits - 1); weight_shape: [2].
    weight (int-quantized, naive-quantized): int8 [outputs, inputs].
    weight (float-quantized): float8, see scaled.py.
Integer layers also have:
    weight_scale: [outputs, groups], [outputs], or one value for the whole layer.
    weight_zero_point: int8 [outputs, groups], or packed like codes along outputs; absent if symmetric.
    weight_g_idx: int32 [inputs], the group of each input; absent, or all -1, if groups are consecutive inputs.
The weight is (code - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.files import (
    EncodedWeight,
    IntegerMatrix,
    IntegerWeight,
    Rows,
    StoredTensor,
    unpack_words,
)
from topw_deploy.export.source.scaled import scaled_weights

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Names of the tensors of a packed layer, after the layer's name."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each half byte of a word holds, lowest half byte first
_PACKED_TYPES = ("I32", "F16", "F32", "I64")


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint packs its integer codes.

    method: `gptq` or `awq`.
    bits: bits of a code.
    zero_offset: the number to add to each stored zero point.
    """

    method: str
    bits: int
    zero_offset: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PackedFormat | None:
        """Return the format that a quantization_config states; None for one that this module cannot read."""
        method, bits = str(settings.get("quant_method", "")).lower(), settings.get("bits", settings.get("w_bit"))
        version = str(settings.get("version", "gemm")).lower()
        is_version_2 = str(settings.get("checkpoint_format", "gptq")).lower() == "gptq_v2"
        if method == "gptq" and bits in (4, 8):
            return cls("gptq", bits, 0 if is_version_2 else 1)
        if method == "awq" and bits == 4 and version == "gemm":
            return cls("awq", 4, 0)
        return None


class PackedWeight(IntegerWeight):
    """The weight of a GPTQ or AWQ layer.

    prefix: the layer's name.
    parts: the layer's tensors, with keys in PARTS.
    Raises SourceError for missing tensors or wrong shapes.
    """

    def __init__(self, prefix: str, kind: PackedFormat, parts: dict[str, StoredTensor]) -> None:
        self.name, self._kind, self._parts = prefix, kind, parts
        for part in ("qweight", "qzeros", "scales"):
            if part not in parts:
                raise SourceError(f"the checkpoint lacks {prefix}.{part}; fetch it again.")
        words = parts["qweight"]
        if len(words.shape) != 2:
            raise SourceError(f"{words.path} holds {prefix}.qweight of shape {words.shape}; fetch it again.")
        (rows, columns), per_word = words.shape, 32 // kind.bits
        self.shape = (columns, rows * per_word) if kind.method == "gptq" else (columns * per_word, rows)

    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        """Return the codes of some rows. Unpacks the whole layer, because outputs share words."""
        try:
            found = unpack_layer(self._kind, {part: _map_packed(stored) for part, stored in self._parts.items()})
        except SourceError as error:
            raise SourceError(f"{self.name}: {error}") from None
        return IntegerMatrix(found.codes[rows], found.scales[rows], found.zeros[rows], found.groups, found.bits)


def packed_weights(stored: Mapping[str, StoredTensor], kind: PackedFormat) -> tuple[dict[str, EncodedWeight], set[str]]:
    """Return a checkpoint's packed weights by name, and the names of all tensors that hold them.

    Raises SourceError for a missing tensor.
    """
    found: dict[str, EncodedWeight] = {}
    used: set[str] = set()
    for prefix, parts in packed_layers(stored).items():
        found[f"{prefix}.weight"] = PackedWeight(prefix, kind, {part: stored[f"{prefix}.{part}"] for part in parts})
        used |= {f"{prefix}.{part}" for part in parts}
    return found, used


def unpack_layer(kind: PackedFormat, parts: dict[str, np.ndarray]) -> IntegerMatrix:
    """Unpack a layer's tensors (keys in PARTS). Raises SourceError for inconsistent sizes or groups."""
    try:
        words, scales = parts["qweight"], parts["scales"].astype(np.float32).T
        if kind.method == "gptq":
            codes = unpack_words(words.T, kind.bits)
            zeros = unpack_words(parts["qzeros"], kind.bits).T
        else:
            codes, zeros = _unpack_interleaved(words).T, _unpack_interleaved(parts["qzeros"]).T
        zeros = zeros.astype(np.int32) + kind.zero_offset
        outputs, inputs = codes.shape
        count = scales.shape[1]
        groups = parts["g_idx"].astype(np.int64) if "g_idx" in parts else np.arange(inputs) // -(-inputs // count)
        fits = scales.shape == zeros.shape == (outputs, count) and groups.shape == (inputs,)
        if not fits or groups.min() < 0 or groups.max() >= count:
            raise ValueError(f"codes {codes.shape}, scales {scales.shape}, zero points {zeros.shape} do not fit")
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise SourceError(f"a {kind.method} layer of the checkpoint is damaged ({error}); fetch it again.") from None
    return IntegerMatrix(np.ascontiguousarray(codes), np.ascontiguousarray(scales), zeros, groups, kind.bits)


def _unpack_interleaved(words: np.ndarray) -> np.ndarray:
    """Unpack AWQ's 4-bit codes, int32 [n, m] -> uint8 [n, m * 8], in the order of outputs."""
    unpacked = unpack_words(words, 4).reshape(len(words), -1, 8)
    found = np.empty_like(unpacked)
    found[..., _AWQ_ORDER] = unpacked
    return found.reshape(len(words), -1)


def packed_layers(names: Iterable[str]) -> dict[str, set[str]]:
    """Return {layer: the PARTS that it has} for every layer with a qweight among the tensor `names`."""
    found: dict[str, set[str]] = {}
    for name in names:
        prefix, _, part = name.rpartition(".")
        if part in PARTS:
            found.setdefault(prefix, set()).add(part)
    return {prefix: parts for prefix, parts in found.items() if "qweight" in parts}


def _map_packed(stored: StoredTensor) -> np.ndarray:
    if stored.dtype not in _PACKED_TYPES or not stored.nbytes:
        raise SourceError(
            f"{stored.path} holds a packed layer as {stored.dtype}, which is not supported; fetch it again."
        )
    return stored.array()


INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_FORMATS = (*INTEGER_FORMATS, "float-quantized", "mixed-precision", "dense")
_PACKED_BITS = (4, 8)
_PARTS = ("packed", "scale", "zero_point", "g_idx", "shape")
_SCALE_TYPES = ("F32", "F16", "BF16")


class CompressedWeight(IntegerWeight):
    """The weight of a linear layer stored as integer codes.

    parts: the layer's tensors by name without `weight_`, and the codes as "codes".
    Raises SourceError for missing tensors, and for types or shapes that do not fit.
    """

    def __init__(self, name: str, parts: dict[str, StoredTensor]) -> None:
        self.name, self._parts = name, parts
        codes = parts["codes"]
        self._packed = codes.dtype == "I32"
        if "scale" not in parts:
            raise SourceError(f"the checkpoint lacks {name}_scale, which {name} needs; fetch it again.")
        if len(codes.shape) != 2 or codes.dtype not in ("I32", "I8") or 0 in codes.shape:
            raise self._mismatch_error("codes", codes)
        self.shape = self._full_shape()
        self._bits = self._bits_per_code()
        self._check_part("scale", _SCALE_TYPES)
        if "zero_point" in parts:
            self._check_part("zero_point", ("I8", "I32"))
        self._groups = self._input_groups()

    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        codes = np.asarray(self._parts["codes"].array()[rows])
        if self._packed:
            unpacked = unpack_words(codes, self._bits)[:, : self.shape[1]]
        else:
            unpacked = (codes.astype(np.int16) + 128).astype(np.uint8)
        scales, zeros = self._broadcast_rows(self._scales(), rows), self._broadcast_rows(self._zeros(), rows)
        return IntegerMatrix(np.ascontiguousarray(unpacked), scales, zeros, self._groups, self._bits)

    @property
    def _group_count(self) -> int:
        shape = self._parts["scale"].shape
        return shape[1] if len(shape) == 2 else 1

    def _full_shape(self) -> tuple[int, int]:
        outputs, inputs = self._parts["codes"].shape
        if not self._packed:
            return outputs, inputs
        stored = self._parts.get("shape")
        if stored is None:
            raise SourceError(f"the checkpoint lacks {self.name}_shape, which {self.name} needs; fetch it again.")
        if stored.dtype not in ("I64", "I32"):
            raise self._mismatch_error("shape", stored)
        found = tuple(int(size) for size in np.asarray(stored.array()).reshape(-1))
        if len(found) != 2 or found[0] != outputs or found[1] < 1:
            raise SourceError(f"{self.name}_shape says {found}, but the codes have {outputs} outputs; fetch it again.")
        return found[0], found[1]

    def _bits_per_code(self) -> int:
        if not self._packed:
            return 8
        words = self._parts["codes"].shape[1]
        fitting = [bits for bits in _PACKED_BITS if -(-self.shape[1] * bits // 32) == words]
        if len(fitting) != 1:
            raise SourceError(
                f"{self.name}_packed has {words} words for {self.shape[1]} inputs, which are codes of neither 4 nor 8 "
                "bits; fetch it again, or export another checkpoint of the model."
            )
        return fitting[0]

    def _check_part(self, part: str, types: tuple[str, ...]) -> None:
        stored, outputs = self._parts[part], self.shape[0]
        packed = part == "zero_point" and stored.dtype == "I32"
        rows = -(-outputs * self._bits // 32) if packed else outputs
        fits = stored.shape in ((rows, self._group_count), (rows,), (1,), (), (1, 1))
        if stored.dtype not in types or not fits or not 1 <= self._group_count <= self.shape[1]:
            raise self._mismatch_error(part, stored)

    def _mismatch_error(self, part: str, stored: StoredTensor) -> SourceError:
        return SourceError(
            f"{stored.path} stores the {part.replace('_', ' ')} of {self.name} as {stored.dtype} of shape "
            f"{stored.shape}, which does not fit; fetch it again."
        )

    def _input_groups(self) -> np.ndarray:
        inputs, count = self.shape[1], self._group_count
        if "g_idx" in self._parts:
            groups = np.asarray(self._parts["g_idx"].array()).astype(np.int64)
            if groups.shape != (inputs,):
                raise self._mismatch_error("g_idx", self._parts["g_idx"])
            if not (groups == -1).all():
                if groups.min() < 0 or groups.max() >= count:
                    raise SourceError(f"{self.name}_g_idx names groups outside 0 to {count - 1}; fetch it again.")
                return groups
        return np.arange(inputs) // -(-inputs // count)

    def _scales(self) -> np.ndarray:
        return np.asarray(self._parts["scale"].array()).astype(np.float32)

    def _zeros(self) -> np.ndarray:
        middle, stored = 2 ** (self._bits - 1), self._parts.get("zero_point")
        if stored is None:
            return np.full((1, 1), middle, np.int32)
        array = np.asarray(stored.array())
        if stored.dtype == "I32":
            return unpack_words(array.T, self._bits)[:, : self.shape[0]].T.astype(np.int32)
        return array.astype(np.int32) + middle

    def _broadcast_rows(self, array: np.ndarray, rows: Rows) -> np.ndarray:
        """Broadcast `array` to [outputs, groups] and return its `rows`."""
        wide = array.reshape(-1, array.shape[1] if array.ndim == 2 else 1)
        return np.ascontiguousarray(np.broadcast_to(wide, (self.shape[0], self._group_count))[rows])


def has_integer_weights(settings: dict[str, Any], where: str) -> bool:
    """Whether the weights are integer codes. Raises UnsupportedModelError for formats that are not supported.

    where: the checkpoint, for messages.
    """
    groups = settings.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    named = [settings.get("format"), *(group.get("format") for group in groups.values() if isinstance(group, dict))]
    formats = {str(name) for name in named if name is not None} or {"dense"}
    sparsity = settings.get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, dict) else None
    others = sorted(formats - set(_FORMATS)) + ([str(sparse)] if sparse not in (None, "dense") else [])
    if settings.get("transform_config"):
        others.append("transforms of activations")
    if others:
        raise UnsupportedModelError(
            f"the checkpoint in {where} is compressed as {others[0]}, but of compressed-tensors only "
            f"{', '.join(_FORMATS)} are supported; export the uncompressed one."
        )
    return bool(formats & {*INTEGER_FORMATS, "mixed-precision"})


def compressed_weights(
    stored: Mapping[str, StoredTensor], blocks: tuple[int, int] | None
) -> tuple[dict[str, EncodedWeight], set[str]]:
    """Return a checkpoint's compressed weights by name, and the names of all tensors that hold them.

    blocks: block size (rows, columns) of float8 weights that have a scale per block, else None.
    Raises SourceError for missing tensors, wrong types or shapes.
    """
    found, used = scaled_weights(stored, blocks)
    for name, tensor in stored.items():
        weight = name.removesuffix("_packed")
        packed = name.endswith(".weight_packed")
        if not packed and not (name.endswith(".weight") and tensor.dtype == "I8"):
            continue
        parts = {part: stored[f"{weight}_{part}"] for part in _PARTS if f"{weight}_{part}" in stored}
        found[weight] = CompressedWeight(weight, {**parts, "codes": tensor})
        used |= {f"{weight}_{part}" for part in parts}
    return found, used

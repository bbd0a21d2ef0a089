"""Decode AutoGPTQ and AutoAWQ checkpoints with NumPy (docs/guide/quantisation.md).

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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.stored import (
    EncodedWeight,
    IntegerMatrix,
    IntegerWeight,
    Rows,
    StoredTensor,
    unpack_words,
)

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

"""Decode AutoGPTQ and AutoAWQ checkpoints with NumPy (docs/guide/quantisation.md).

A linear layer [outputs, inputs] has integers `q`, and a scale and a zero point for each output and group of inputs:
weight = (q - zero) * scale.

GPTQ:
    qweight: int32 [inputs * bits / 32, outputs]; a word holds consecutive inputs.
    qzeros: int32 [groups, outputs * bits / 32]; a word holds consecutive outputs, each minus one in version 1.
    scales: float16 [groups, outputs].
    g_idx: int32 [inputs], the group of each input; without it, groups are consecutive inputs.
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
"""The tensors of a packed layer."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each half byte, lowest first
_PACKED_TYPES = ("I32", "F16", "F32", "I64")


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint is packed.

    method: `gptq` or `awq`.
    zero_offset: added to stored zero points.
    """

    method: str
    bits: int
    zero_offset: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PackedFormat | None:
        """The packing of a quantization_config; None if this module does not read its format."""
        method, bits = str(settings.get("quant_method", "")).lower(), settings.get("bits", settings.get("w_bit"))
        version = str(settings.get("version", "gemm")).lower()
        second = str(settings.get("checkpoint_format", "gptq")).lower() == "gptq_v2"
        if method == "gptq" and bits in (4, 8):
            return cls("gptq", bits, 0 if second else 1)
        if method == "awq" and bits == 4 and version == "gemm":
            return cls("awq", 4, 0)
        return None


class PackedWeight(IntegerWeight):
    """The weight of a GPTQ or AWQ layer.

    parts: its tensors, with keys in PARTS.
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
        """Decodes the whole layer, because outputs share words."""
        try:
            found = unpack(self._kind, {part: _array(stored) for part, stored in self._parts.items()})
        except SourceError as error:
            raise SourceError(f"{self.name}: {error}") from None
        return IntegerMatrix(found.codes[rows], found.scales[rows], found.zeros[rows], found.groups, found.bits)


def packed_weights(stored: Mapping[str, StoredTensor], kind: PackedFormat) -> tuple[dict[str, EncodedWeight], set[str]]:
    """The packed weights of a checkpoint, and the names of all their tensors. Raises SourceError for a missing one."""
    found: dict[str, EncodedWeight] = {}
    used: set[str] = set()
    for prefix, parts in layers_of(stored).items():
        found[f"{prefix}.weight"] = PackedWeight(prefix, kind, {part: stored[f"{prefix}.{part}"] for part in parts})
        used |= {f"{prefix}.{part}" for part in parts}
    return found, used


def unpack(kind: PackedFormat, parts: dict[str, np.ndarray]) -> IntegerMatrix:
    """Unpack a layer's tensors (keys in PARTS). Raises SourceError for inconsistent sizes or groups."""
    try:
        words, scales = parts["qweight"], parts["scales"].astype(np.float32).T
        if kind.method == "gptq":
            codes = unpack_words(words.T, kind.bits)
            zeros = unpack_words(parts["qzeros"], kind.bits).T
        else:
            codes, zeros = _interleaved(words).T, _interleaved(parts["qzeros"]).T
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


def _interleaved(words: np.ndarray) -> np.ndarray:
    """AWQ's int32 [n, m] -> uint8 [n, m * 8]."""
    held = unpack_words(words, 4).reshape(len(words), -1, 8)
    found = np.empty_like(held)
    found[..., _AWQ_ORDER] = held
    return found.reshape(len(words), -1)


def layers_of(names: Iterable[str]) -> dict[str, set[str]]:
    """Prefix of a layer -> its tensors' names in PARTS."""
    found: dict[str, set[str]] = {}
    for name in names:
        prefix, _, part = name.rpartition(".")
        if part in PARTS:
            found.setdefault(prefix, set()).add(part)
    return {prefix: parts for prefix, parts in found.items() if "qweight" in parts}


def _array(stored: StoredTensor) -> np.ndarray:
    if stored.dtype not in _PACKED_TYPES or not stored.nbytes:
        raise SourceError(
            f"{stored.path} holds a packed layer as {stored.dtype}, which is not supported; fetch it again."
        )
    return stored.array()

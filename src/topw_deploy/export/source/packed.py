"""Unpack AutoGPTQ and AutoAWQ checkpoints with NumPy (docs/guide/quantisation.md).

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

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.safetensors_files import StoredTensor, stored_tensors

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""The tensors of a packed layer."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each half byte, lowest first
_PACKED_TYPES = ("I32", "F16", "F32", "I64")
_READ = "GPTQ of 4 and 8 bits, AWQ of 4 bits (gemm)"


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint is packed.

    method: `gptq` or `awq`.
    zero_offset: added to stored zero points.
    """

    method: str
    bits: int
    zero_offset: int


@dataclass(frozen=True)
class PackedMatrix:
    """One unpacked layer.

    codes: uint8 [outputs, inputs].
    scales: float32 [outputs, groups].
    zeros: int32 [outputs, groups].
    groups: int64 [inputs], the group of each input.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    def weight(self) -> np.ndarray:
        """The weight, float32 [outputs, inputs]. It is exact, as codes have at most 8 bits and scales 11."""
        whole = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return whole * self.scales[:, self.groups]


class PackedCheckpoint:
    """A folder's packed layers.

    layers: prefix -> its PARTS.
    Raises SourceError for missing tensors or wrong types.
    """

    def __init__(self, folder: Path, kind: PackedFormat) -> None:
        self.kind = kind
        self._stored = stored_tensors(folder)
        self.layers = layers_of(self._stored)
        for prefix, parts in self.layers.items():
            missing = {"qweight", "qzeros", "scales"} - parts
            if missing:
                raise SourceError(f"{folder} lacks {prefix}.{min(missing)}; fetch the checkpoint again.")

    @classmethod
    def of(cls, folder: Path) -> PackedCheckpoint | None:
        """Open the checkpoint in `folder`; None if it is not packed."""
        kind = packed_format(folder)
        return cls(folder, kind) if kind is not None else None

    def matrix(self, prefix: str) -> PackedMatrix:
        return unpack(self.kind, {part: _array(self._stored[f"{prefix}.{part}"]) for part in self.layers[prefix]})

    def matrices(self) -> Iterator[tuple[str, PackedMatrix]]:
        for prefix in self.layers:
            yield prefix, self.matrix(prefix)

    def unread(self) -> dict[str, Any]:
        """All tensors for transformers, unread; each packed layer becomes one float32 `weight`."""
        import torch

        from topw_deploy.export.source.unread_tensor import UnreadTensor

        packed = {f"{prefix}.{part}" for prefix, parts in self.layers.items() for part in parts}
        found: dict[str, Any] = {
            name: UnreadTensor.of(stored) for name, stored in self._stored.items() if name not in packed
        }
        for prefix in self.layers:
            like = torch.empty(self._size(prefix), dtype=torch.float32, device="meta")
            found[f"{prefix}.weight"] = UnreadTensor(like, self._maker(prefix), None)
        return found

    def _maker(self, prefix: str) -> Callable[[], Any]:
        import torch

        return lambda: torch.from_numpy(self.matrix(prefix).weight())

    def _size(self, prefix: str) -> tuple[int, int]:
        rows, columns = self._stored[f"{prefix}.qweight"].shape
        per_word = 32 // self.kind.bits
        return (columns, rows * per_word) if self.kind.method == "gptq" else (columns * per_word, rows)


def packed_format(folder: Path) -> PackedFormat | None:
    """How the checkpoint in `folder` is packed; None for ordinary weights.

    Raises UnsupportedModelError for unsupported quantisation, SourceError for a damaged configuration.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        settings = config.get("quantization_config")
        if settings is None:
            return None
        method, bits = str(settings.get("quant_method", "")).lower(), settings.get("bits", settings.get("w_bit"))
        version = str(settings.get("version", "gemm")).lower()
        second = str(settings.get("checkpoint_format", "gptq")).lower() == "gptq_v2"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SourceError(f"{folder / 'config.json'} is damaged ({error}); fetch it again.") from None
    if method == "gptq" and bits in (4, 8):
        return PackedFormat("gptq", bits, 0 if second else 1)
    if method == "awq" and bits == 4 and version == "gemm":
        return PackedFormat("awq", 4, 0)
    raise UnsupportedModelError(
        f"the checkpoint in {folder} is quantised by {method or 'an unnamed method'} ({bits} bits), but only {_READ} "
        "are supported; export the unquantised one."
    )


def unpack(kind: PackedFormat, parts: dict[str, np.ndarray]) -> PackedMatrix:
    """Unpack a layer's tensors (keys in PARTS). Raises SourceError for inconsistent sizes or groups."""
    try:
        words, scales = parts["qweight"], parts["scales"].astype(np.float32).T
        if kind.method == "gptq":
            codes = _consecutive(words.T, kind.bits)
            zeros = _consecutive(parts["qzeros"], kind.bits).T
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
    return PackedMatrix(np.ascontiguousarray(codes), np.ascontiguousarray(scales), zeros, groups, kind.bits)


def _consecutive(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)


def _interleaved(words: np.ndarray) -> np.ndarray:
    """AWQ's int32 [n, m] -> uint8 [n, m * 8]."""
    held = _consecutive(words, 4).reshape(len(words), -1, 8)
    found = np.empty_like(held)
    found[..., _AWQ_ORDER] = held
    return found.reshape(len(words), -1)


def layers_of(names: Iterable[str]) -> dict[str, set[str]]:
    """Prefix -> its PARTS."""
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

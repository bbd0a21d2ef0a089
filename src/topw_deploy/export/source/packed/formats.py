"""The tensors of GPTQ and AWQ checkpoints, as AutoGPTQ and AutoAWQ lay them out, unpacked with NumPy alone.

Both store a linear layer [outputs, inputs] as integers `q` with a scale and a zero point for each output and group of
inputs; a weight is (q - zero) * scale. They differ in which way eight 4-bit numbers lie in an int32:

| | GPTQ | AWQ (`version: gemm`) |
|---|---|---|
| `qweight` | int32 [inputs * bits / 32, outputs]: consecutive inputs | int32 [inputs, outputs / 8]: 8 outputs, mixed |
| `qzeros` | int32 [groups, outputs * bits / 32]: consecutive outputs, one less than meant in version 1 | as qweight |
| `scales` | float16 [groups, outputs] | float16 [groups, outputs] |
| `g_idx` | int32 [inputs], the group of each input; groups are consecutive without it | none |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""What a packed layer has in place of its `weight`."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output of eight each half byte holds, the lowest first
_READ = "GPTQ of 4 and 8 bits, AWQ of 4 bits (gemm)"


@dataclass(frozen=True)
class PackedFormat:
    """method: `gptq` or `awq`. bits: of a weight. zero_offset: what is added to a stored zero point."""

    method: str
    bits: int
    zero_offset: int


@dataclass(frozen=True)
class PackedMatrix:
    """One layer's numbers: codes uint8 [outputs, inputs], scales float32 and zeros int32 [outputs, groups], the group
    of each input int64 [inputs]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    def weight(self) -> np.ndarray:
        """float32 [outputs, inputs]; exact, as a code has few bits and a scale eleven."""
        whole = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return whole * self.scales[:, self.groups]


def packed_format(folder: Path) -> PackedFormat | None:
    """How the checkpoint in `folder` is packed, by its config.json; None for ordinary weights.

    Raises UnsupportedModelError for a quantisation that is not read, SourceError for a damaged configuration.
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
        f"the checkpoint in {folder} is quantised by {method or 'an unnamed method'} ({bits} bits), but what is read "
        f"is {_READ}; export the unquantised one."
    )


def unpack(kind: PackedFormat, parts: dict[str, np.ndarray]) -> PackedMatrix:
    """The numbers in the tensors `parts` (by their names of PARTS) of one layer.

    Raises SourceError for sizes that do not fit together, and for groups out of range.
    """
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
    """int32 [n, m] -> uint8 [n, m * 32 / bits], the lowest bits of a word first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)


def _interleaved(words: np.ndarray) -> np.ndarray:
    """AWQ's int32 [n, m] -> uint8 [n, m * 8]."""
    held = _consecutive(words, 4).reshape(len(words), -1, 8)
    found = np.empty_like(held)
    found[..., _AWQ_ORDER] = held
    return found.reshape(len(words), -1)


def layers_of(names: Any) -> dict[str, set[str]]:
    """Prefix of every packed layer among tensor `names` -> which of PARTS it has."""
    found: dict[str, set[str]] = {}
    for name in names:
        prefix, _, part = name.rpartition(".")
        if part in PARTS:
            found.setdefault(prefix, set()).add(part)
    return {prefix: parts for prefix, parts in found.items() if "qweight" in parts}

"""A packed checkpoint as the float tensors that transformers expects, each unpacked when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.packed.formats import PackedFormat, PackedMatrix, layers_of, packed_format, unpack
from topw_deploy.export.source.safetensors_files import StoredTensor, stored_tensors

_TYPES = {"I32": np.int32, "F16": np.float16, "F32": np.float32, "I64": np.int64}


class PackedCheckpoint:
    """The packed layers of a folder. Raises SourceError for tensors that are missing or of the wrong type."""

    def __init__(self, folder: Path, kind: PackedFormat) -> None:
        self.kind = kind
        self._stored = stored_tensors(folder)
        self.layers = layers_of(self._stored)
        for prefix, parts in self.layers.items():
            lacking = {"qweight", "qzeros", "scales"} - parts
            if lacking:
                raise SourceError(f"{folder} lacks {prefix}.{min(lacking)}; fetch the checkpoint again.")

    @classmethod
    def of(cls, folder: Path) -> PackedCheckpoint | None:
        """The packed checkpoint in `folder`, None for an ordinary one. Raises what packed_format raises."""
        kind = packed_format(folder)
        return cls(folder, kind) if kind is not None else None

    def matrix(self, prefix: str) -> PackedMatrix:
        return unpack(self.kind, {part: _map(self._stored[f"{prefix}.{part}"]) for part in self.layers[prefix]})

    def matrices(self) -> Iterator[tuple[str, PackedMatrix]]:
        for prefix in self.layers:
            yield prefix, self.matrix(prefix)

    def unread(self) -> dict[str, Any]:
        """Every tensor that transformers expects as an UnreadTensor, packed layers as `weight` in float32."""
        import torch

        from topw_deploy.export.source.unread_tensor import UnreadTensor

        found: dict[str, Any] = {}
        packed = {f"{prefix}.{part}" for prefix, parts in self.layers.items() for part in parts}
        for name, stored in self._stored.items():
            if name not in packed:
                found[name] = UnreadTensor.of(stored)
        for prefix in self.layers:
            like = torch.empty(self._size(prefix), dtype=torch.float32, device="meta")
            found[f"{prefix}.weight"] = UnreadTensor(like, self._maker(prefix), None)
        return found

    def _maker(self, prefix: str) -> Any:
        import torch

        return lambda: torch.from_numpy(self.matrix(prefix).weight())

    def _size(self, prefix: str) -> tuple[int, int]:
        rows, columns = self._stored[f"{prefix}.qweight"].shape
        per_word = 32 // self.kind.bits
        return (columns, rows * per_word) if self.kind.method == "gptq" else (columns * per_word, rows)


def _map(stored: StoredTensor) -> np.ndarray:
    if stored.dtype not in _TYPES or not stored.nbytes:
        raise SourceError(f"{stored.path} holds a packed layer as {stored.dtype}, which is not read; fetch it again.")
    kind = np.dtype(_TYPES[stored.dtype])
    return np.memmap(stored.path, dtype=kind, mode="r", offset=stored.offset, shape=stored.shape)

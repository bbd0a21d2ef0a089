"""Locate the tensors of a checkpoint in its safetensors files, or else in PyTorch's files, without reading them.

PyTorch's `pytorch_model.bin` is a zip archive of uncompressed records: a pickle that describes the tensors, and the
tensors' bytes. torch reads the pickle with `weights_only`, so that it builds nothing but tensors, and in fake mode, so
that the bytes stay in the file.
"""

from __future__ import annotations

import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import SourceError, one_line
from topw_deploy.folders import open_regular, read_bounded
from topw_deploy.safetensors_header import LARGEST_HEADER, METADATA, read_entry, read_header, refuse_overlap

if TYPE_CHECKING:
    import torch

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    each.safetensors: ir.DataType(each.number).numpy() for each in ELEMENT_TYPES.values() if each.safetensors
}
"""safetensors' name of an element type -> the dtype of NumPy or ml_dtypes, whose name is also torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file.

    offset, nbytes: in bytes.
    dtype: a key of NUMPY_TYPES.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def array(self, mode: Literal["r", "c"] = "r") -> np.ndarray:
        """Memory-map the tensor: read-only with mode `r`, copy-on-write with mode `c`."""
        if self.nbytes == 0:
            return np.empty(self.shape, NUMPY_TYPES[self.dtype])
        return np.memmap(self.path, NUMPY_TYPES[self.dtype], mode, self.offset, self.shape)


Rows = Any
"""A NumPy index of the first axis: a slice, or an integer array."""


class EncodedWeight(ABC):
    """A weight that must be decoded before the model can compute with it.

    name: the name of the weight's main tensor in the checkpoint.
    shape: the shape after decoding.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, rows: Rows) -> np.ndarray:
        """Decode the given rows to float32, without reading others.

        Raises SourceError for values that cannot be decoded.
        """

    def read(self, index: Any) -> np.ndarray:
        """Return the float32 values at a NumPy index.

        Reads whole rows: only the first axis of the index saves reading.
        """
        rows, others = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        found = self.rows(slice(None) if rows is ... else rows)
        return found[(slice(None), *others)] if others else found


@dataclass(frozen=True)
class IntegerMatrix:
    """A weight as integer codes: (code - zero) * scale.

    codes: uint8 [outputs, inputs].
    scales: float32 [outputs, groups].
    zeros: int32 [outputs, groups].
    groups: int64 [inputs], the group of each input.
    bits: bits of a code, 4 or 8.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int

    def weight(self) -> np.ndarray:
        """The decoded weight, float32 [outputs, inputs]. Exact for scales of at most 16 significant bits."""
        steps = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return steps * self.scales[:, self.groups]


class IntegerWeight(EncodedWeight):
    """A weight stored as integer codes, which MatMulNBits can use unchanged."""

    @abstractmethod
    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        """Return the codes, scales and zero points of some rows."""

    def rows(self, rows: Rows) -> np.ndarray:
        return self.matrix(rows).weight()


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes from words, lowest bits first: int32 [n, m] -> uint8 [n, m * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TORCH_INDEX, TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_TORCH_SUFFIX = ".bin"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return {tensor name: file}. Like transformers, prefers safetensors to PyTorch's files, and one file to an index.

    Raises SourceError for a damaged index, and if there are no weights.
    """
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        if (folder / single).is_file():
            return dict.fromkeys(_tensor_names(folder / single), folder / single)
        if (folder / index).is_file():
            return _read_index(folder, index)
    raise SourceError(
        f"{folder} holds neither {SINGLE} nor {TORCH_SINGLE}; fetch the weights, or give the table with --embeddings."
    )


def _read_index(folder: Path, index: str) -> dict[str, Path]:
    try:
        data = read_bounded(folder / index, LARGEST_HEADER, follow=True)
        weight_map = json.loads(data.decode("utf-8"))["weight_map"]
        return {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{folder / index} is damaged ({error}); fetch it again.") from None


def _tensor_names(path: Path) -> Iterable[str]:
    if path.suffix == _TORCH_SUFFIX:
        return tensors_in_torch_file(path)
    return (name for name in _read_header(path)[0] if name != METADATA)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the locations of all tensors in `folder`, by name. Raises SourceError for missing or damaged files."""
    files = tensor_files(folder)
    found: dict[str, StoredTensor] = {}
    for path in sorted(set(files.values())):
        found |= tensors_in(path, {name for name in files if files[name] == path})
    return found


def tensors_in(path: Path, names: set[str]) -> dict[str, StoredTensor]:
    """Return the locations of the tensors `names` in a file.

    Raises SourceError for a damaged file or missing tensor.
    """
    if path.suffix == _TORCH_SUFFIX:
        found = tensors_in_torch_file(path)
        _check_complete(path, names, found)
        return {name: found[name] for name in names}
    header, start = _read_header(path)
    _check_complete(path, names, header)
    size = path.stat().st_size
    try:
        entries = {name: read_entry(name, given) for name, given in header.items() if name in names}
        refuse_overlap(entries)
        for name, entry in entries.items():
            if start + entry.end > size:
                raise ValueError(f"it has {size} bytes, but {name} ends at {start + entry.end}")
        end = start + max((entry.end for entry in entries.values()), default=0)
        if end < size and entries.keys() == header.keys() - {METADATA}:
            raise ValueError(f"it has {size} bytes, but its last tensor ends at {end}")
    except ValueError as error:
        raise SourceError(f"{path} is damaged ({error}); fetch it again.") from None
    return {
        name: StoredTensor(path, start + entry.begin, entry.dtype, entry.shape, entry.end - entry.begin)
        for name, entry in entries.items()
    }


def _check_complete(path: Path, names: set[str], found: Mapping[str, Any]) -> None:
    missing = sorted(names - found.keys())
    if missing:
        raise SourceError(f"{path} lacks the tensor {missing[0]} of its index; fetch it again.")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with open_regular(path, follow=True) as stream:
            return read_header(stream, os.fstat(stream.fileno()).st_size)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is not a safetensors file ({error}); fetch it again.") from None


_LONGEST_ORDER = 16  # bytes: "little" or "big", and spaces
_SAFETENSORS_NAMES = {kind.name: name for name, kind in NUMPY_TYPES.items()}


def tensors_in_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Return the locations of all tensors in a file, by name.

    Raises SourceError for code in the file, compressed records, and files of PyTorch before 1.6.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    _check_archive(path)
    try:
        with FakeTensorMode():
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # reading a pickle can raise any error
        raise SourceError(
            f"{path} holds more than tensors, or is damaged ({one_line(error, 120)}); convert the weights to "
            "safetensors where you trust the file."
        ) from None
    if not isinstance(found, dict):
        raise SourceError(f"{path} holds a {type(found).__name__}, not tensors by name; save the model's state_dict.")
    size = path.stat().st_size
    return {
        str(name): _locate_tensor(path, str(name), value, size)
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
    }


def _check_archive(path: Path) -> None:
    """Raises SourceError unless the archive's records are uncompressed and little-endian."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            compressed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
            stated = [record for record in records if record.filename.endswith("/byteorder")]
            # Do not read compressed records: a small one can unpack to any size.
            orders = [
                archive.read(record) for record in stated if not compressed and record.file_size <= _LONGEST_ORDER
            ]
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise SourceError(
            f"{path} is not a file of PyTorch 1.6 or newer ({one_line(error)}); fetch it again, or save it with a "
            "newer version."
        ) from None
    if compressed or len(orders) < len(stated) or any(order.strip() != b"little" for order in orders):
        what = f"compressed records ({compressed[0]})" if compressed else "bytes in big-endian order"
        raise SourceError(f"{path} has {what}; load and save it with PyTorch.")


def _locate_tensor(path: Path, name: str, tensor: torch.Tensor, size: int) -> StoredTensor:
    kind = _SAFETENSORS_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    start: Any = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if kind is None or start is None or not tensor.is_contiguous():
        how = f"type {tensor.dtype}" if kind is None else "a layout that is not contiguous"
        raise SourceError(f"{path} stores {name} in {how}; convert the weights to safetensors.")
    offset = int(start) + int(tensor.storage_offset()) * tensor.itemsize
    nbytes = int(tensor.numel()) * tensor.itemsize
    if offset + nbytes > size:
        raise SourceError(f"{path} has {size} bytes, but {name} ends at {offset + nbytes}; fetch it again.")
    return StoredTensor(path, offset, kind, tuple(tensor.shape), nbytes)

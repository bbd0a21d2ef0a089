"""Locate tensors in PyTorch's files, `pytorch_model.bin`, without reading them or running code in them.

Such a file is a zip archive of uncompressed records: a pickle that describes the tensors, and the tensors' bytes. torch
reads the pickle with `weights_only`, so that it builds nothing but tensors, and in fake mode, so that the bytes stay in
the file.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from topw_deploy.errors import SourceError, one_line
from topw_deploy.export.source.stored import NUMPY_TYPES, StoredTensor

_LONGEST_ORDER = 16  # bytes: "little" or "big", and spaces
_SAFETENSORS_NAMES = {kind.name: name for name, kind in NUMPY_TYPES.items()}


def tensors_in_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Return the locations of all tensors in a file, by name.

    Raises SourceError for code in the file, compressed records, and files of PyTorch before 1.6.
    """
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

"""Where the tensors of a Hugging Face folder lie in its safetensors files, without reading one of them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_HEADER = 100 << 20  # safetensors' own limit
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element of safetensors' types."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its file, where its bytes start there, its type in safetensors' words, its shape."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file of `folder` that it lies in; the one file before the index, as transformers.

    Raises SourceError for a damaged index, and for a folder without safetensors.
    """
    single = folder / SINGLE
    if single.is_file():
        return dict.fromkeys((name for name in header_of(single)[0] if name != "__metadata__"), single)
    if (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{folder / INDEX} is damaged ({error}); fetch it again.") from None
    raise SourceError(
        f"{folder} holds no {SINGLE}; convert the weights to safetensors, or give the table with --embeddings."
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, its place checked against its file's size.

    Raises SourceError for a folder without safetensors, and for a file that is damaged or cut short.
    """
    files = tensor_files(folder)
    found: dict[str, StoredTensor] = {}
    for path in sorted(set(files.values())):
        header, start = header_of(path)
        size = path.stat().st_size
        for name, entry in header.items():
            if files.get(name) == path:
                found[name] = _stored(path, name, entry, start, size)
    missing = sorted(set(files) - set(found))
    if missing:
        raise SourceError(f"{files[missing[0]]} lacks the tensor {missing[0]} of its index; fetch it again.")
    return found


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the offset at which its data starts; SourceError for another file."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise SourceError(f"{path} is not a safetensors file ({error}); fetch it again.") from None
    return header, 8 + length


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
        count = 1
        for dimension in shape:
            count *= dimension
        if end - begin != ITEM_BYTES.get(dtype, 0) * count or min((begin, *shape), default=begin) < 0:
            raise ValueError(f"{name} has {end - begin} bytes for {dtype} of shape {shape}")
        if start + end > size:
            raise ValueError(f"it has {size} bytes, but {name} ends at {start + end}")
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is damaged ({error}); fetch it again.") from None
    return StoredTensor(path, start + begin, dtype, shape, end - begin)

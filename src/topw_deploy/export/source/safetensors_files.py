"""Locate the tensors of a checkpoint in its safetensors files, or else in PyTorch's files (torch_files.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError
from topw_deploy.export.source.stored import StoredTensor
from topw_deploy.folders import open_regular, read_bounded
from topw_deploy.safetensors_header import LARGEST_HEADER, METADATA, read_entry, read_header, refuse_overlap

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
        return _torch_tensors(path)
    return (name for name in _read_header(path)[0] if name != METADATA)


def _torch_tensors(path: Path) -> dict[str, StoredTensor]:
    from topw_deploy.export.source.torch_files import tensors_in_torch_file  # imports torch

    return tensors_in_torch_file(path)


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
        found = _torch_tensors(path)
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

"""Memory-map input embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.npy_files import mapped_array
from topw_deploy.export.source.safetensors_files import NUMPY_TYPES, tensor_files, tensors_in

# Table names in transformers, without prefixes.
_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_TYPES = ("F64", "F32", "F16", "BF16")


def embeddings_of_folder(folder: Path) -> np.ndarray:
    """Memory-map a checkpoint's input embeddings [rows, hidden].

    Raises SourceError for missing or damaged safetensors, UnsupportedModelError unless exactly one tensor matches.
    """
    places = tensor_files(folder)
    found = sorted(name for name in places if name.endswith(_NAMES))
    if len(found) != 1:
        which = f"{len(found)} ({', '.join(found)})" if found else "none"
        raise UnsupportedModelError(
            f"the input embeddings in {folder} are not clear: {which} have one of the usual names "
            f"({', '.join(_NAMES)}); "
            "save the table as .npy and give it with --embeddings."
        )
    (name,) = found
    stored = tensors_in(places[name], {name})[name]
    if stored.dtype not in _TYPES:
        raise UnsupportedModelError(
            f"the embedding table {name} is stored as {stored.dtype}, but must be one of {', '.join(_TYPES)}; "
            "save the unquantised table as .npy and give it with --embeddings."
        )
    return _checked(stored.array(), name)


def embeddings_of_file(path: Path) -> np.ndarray:
    """Memory-map a .npy table [rows, hidden]. Raises SourceError for other files."""
    return _checked(mapped_array(path, "the embedding table"), str(path))


def _checked(table: np.ndarray, name: str) -> np.ndarray:
    if table.ndim != 2 or 0 in table.shape or table.dtype not in [NUMPY_TYPES[kind] for kind in _TYPES]:
        raise SourceError(
            f"{name} holds {table.dtype} of shape {tuple(table.shape)}, but must hold floating-point numbers of shape "
            "[tokens, hidden]; give such a table."
        )
    return table

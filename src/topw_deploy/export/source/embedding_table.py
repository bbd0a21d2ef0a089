"""Reading one tensor, the input embedding table, from a Hugging Face folder or a NumPy file, without the model.

The table is mapped, not read: a sampler for a model of any size is exported in little memory.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError
from topw_deploy.export.source.safetensors_files import header_of, tensor_files

# How transformers' decoders call the table, by the end of its name.
_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def embeddings_of_folder(folder: Path) -> np.ndarray:
    """The input embeddings [rows, hidden] of the checkpoint in `folder`, a read-only map of its safetensors file.

    Raises SourceError for a folder without safetensors or with damaged ones, UnsupportedModelError if no tensor, or
    more than one, has the name of an input embedding table.
    """
    places = tensor_files(folder)
    found = sorted(name for name in places if name.endswith(_NAMES))
    if len(found) != 1:
        which = f"{len(found)} ({', '.join(found)})" if found else "none"
        raise UnsupportedModelError(
            f"of the tensors in {folder}, {which} look like the input embeddings ({', '.join(_NAMES)}); "
            "save the table as .npy and give it with --embeddings."
        )
    return _map_tensor(places[found[0]], found[0])


def embeddings_of_file(path: Path) -> np.ndarray:
    """The table [rows, hidden] of a .npy file, mapped read-only: float16, float32 or float64.

    Raises SourceError for a file that cannot be read as that.
    """
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist; give a .npy file with the embedding table.") from None
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is not a .npy file of numbers ({error}); save the table with numpy.save.") from None
    return _checked(table, str(path))


def _map_tensor(path: Path, name: str) -> np.ndarray:
    header, start = header_of(path)
    try:
        entry = header[name]
        dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
        if dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"the embedding table {name} is stored as {dtype}, but must be one of {', '.join(_DTYPES)}; "
                "save the unquantised table as .npy and give it with --embeddings."
            )
        kind = np.dtype(_DTYPES[dtype])
        if end - begin != kind.itemsize * int(np.prod(shape)):
            raise ValueError(f"{name} has {end - begin} bytes for shape {shape}")
        table = np.memmap(path, dtype=kind, mode="r", offset=start + begin, shape=shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is damaged ({error}); fetch it again.") from None
    return _checked(table, name)


def _checked(table: np.ndarray, name: str) -> np.ndarray:
    if table.ndim != 2 or 0 in table.shape or table.dtype not in map(np.dtype, _DTYPES.values()):
        raise SourceError(
            f"{name} holds {table.dtype} of shape {tuple(table.shape)}, but an embedding table is [tokens, hidden] of "
            "floating-point numbers; give such a table."
        )
    return table

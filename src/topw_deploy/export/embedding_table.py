"""Reading one tensor, the input embedding table, from a Hugging Face folder or a NumPy file, without the model.

The table is mapped, not read: a sampler for a model of any size is exported in little memory.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError

# How transformers' decoders call the table, by the end of its name.
_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_HEADER = 100 << 20  # safetensors' own limit


def embeddings_of_folder(folder: Path) -> np.ndarray:
    """The input embeddings [rows, hidden] of the checkpoint in `folder`, a read-only map of its safetensors file.

    Raises SourceError for a folder without safetensors or with damaged ones, UnsupportedModelError if no tensor, or
    more than one, has the name of an input embedding table.
    """
    places = _tensor_files(folder)
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


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file it lies in."""
    if (folder / _INDEX).is_file():
        try:
            weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{folder / _INDEX} is damaged ({error}); fetch it again.") from None
    single = folder / _SINGLE
    if single.is_file():
        return dict.fromkeys((name for name in _header(single)[0] if name != "__metadata__"), single)
    raise SourceError(
        f"{folder} holds no {_SINGLE}; convert the weights to safetensors, or give the table with --embeddings."
    )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and the offset at which its data starts."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except (OSError, ValueError, struct.error) as error:
        raise SourceError(f"{path} is not a safetensors file ({error}); fetch it again.") from None
    return header, 8 + length


def _map_tensor(path: Path, name: str) -> np.ndarray:
    header, start = _header(path)
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

"""Read the arrays of `topw export-sampler`: the input embeddings, and logits that the user saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError, one_line
from topw_deploy.export.source.files import NUMPY_TYPES, tensor_files, tensors_in
from topw_deploy.folders import open_regular
from topw_deploy.sampling import Geometry, median_distance

MOST_STEPS = 4096
"""The maximum number of rows in a file of logits. Computing the median takes 32 kB per row."""
# Names of the embedding table in transformers' models, without prefixes.
_TABLE_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_TABLE_TYPES = ("F64", "F32", "F16", "BF16")


def embeddings_of_folder(folder: Path) -> np.ndarray:
    """Memory-map a checkpoint's input embeddings [rows, hidden].

    Raises SourceError for missing or damaged weights, UnsupportedModelError unless exactly one tensor has a usual name
    and a floating-point type.
    """
    places = tensor_files(folder)
    found = sorted(name for name in places if name.endswith(_TABLE_NAMES))
    if len(found) != 1:
        which = f"{len(found)} ({', '.join(found)})" if found else "none"
        raise UnsupportedModelError(
            f"the input embeddings in {folder} are not clear: {which} have one of the usual names "
            f"({', '.join(_TABLE_NAMES)}); "
            "save the table as .npy and give it with --embeddings."
        )
    (name,) = found
    stored = tensors_in(places[name], {name})[name]
    if stored.dtype not in _TABLE_TYPES:
        raise UnsupportedModelError(
            f"the embedding table {name} is stored as {stored.dtype}, but must be one of {', '.join(_TABLE_TYPES)}; "
            "save the unquantised table as .npy and give it with --embeddings."
        )
    return _check_table(stored.array(), name)


def embeddings_of_file(path: Path) -> np.ndarray:
    """Memory-map a .npy table [rows, hidden]. Raises SourceError for other files."""
    return _check_table(map_array(path, "the embedding table"), str(path))


def _check_table(table: np.ndarray, name: str) -> np.ndarray:
    if table.ndim != 2 or 0 in table.shape or table.dtype not in [NUMPY_TYPES[kind] for kind in _TABLE_TYPES]:
        raise SourceError(
            f"{name} holds {table.dtype} of shape {tuple(table.shape)}, but must hold floating-point numbers of shape "
            "[tokens, hidden]; give such a table."
        )
    return table


def map_array(path: Path, content: str) -> np.ndarray:
    """Memory-map the array in a .npy file, read-only.

    content: a noun phrase for the messages, such as "the logits".
    Raises SourceError if the file is missing, is not a regular file or holds no array of numbers.
    """
    try:
        with open_regular(path, follow=True):  # numpy would wait for the writer of a named pipe
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist; give a .npy file with {content}.") from None
    except Exception as error:  # noqa: BLE001  # numpy also raises errors of Python's tokenizer
        raise SourceError(
            f"{path} is not a .npy file of numbers ({one_line(error, 200)}); save {content} with numpy.save."
        ) from None
    return array


def median_distance_in_file(path: Path, geometry: Geometry, vocab_size: int) -> float:
    """Return the median distance of likely pairs of tokens (sampling.geometry) over the steps in a .npy file.

    path: floating-point logits [steps, vocab_size], with 1 to MOST_STEPS steps.
    Raises SourceError for other files, and if no row has two likely tokens at a distance > 0.
    """
    rows = map_array(path, "the logits")
    if rows.ndim != 2 or rows.shape[1] != vocab_size or not 1 <= len(rows) <= MOST_STEPS or rows.dtype.kind != "f":
        raise SourceError(
            f"{path} holds {rows.dtype} of shape {tuple(rows.shape)}, but must hold floating-point logits of shape "
            f"[steps, {vocab_size}], with 1 to {MOST_STEPS} steps; give such logits."
        )
    found = median_distance(geometry, rows)
    if found is None:
        raise SourceError(
            f"the logits in {path} have no two likely tokens at a distance > 0 in any row; give a model's logits at "
            "steps of ordinary texts."
        )
    return found

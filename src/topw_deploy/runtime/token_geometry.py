"""Distances between a model's tokens, from the embedding table that the manifest describes.

Rows of the table are read on demand; no table is loaded whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import ManifestError
from topw_deploy.folders import map_stream
from topw_deploy.manifest import EmbeddingTable, Manifest, StoredArray, open_listed
from topw_deploy.sampling import Geometry

_NUMPY_TYPES = {"float": "<f4", "float16": "<f2", "bfloat16": "<u2", "uint8": "u1"}


@dataclass(frozen=True)
class TokenTable:
    """An embedding table as an array-like [V, d] whose rows are read on demand."""

    shape: tuple[int, int]
    read: Callable[[np.ndarray], np.ndarray]

    def __getitem__(self, ids: Any) -> np.ndarray:
        """The rows float32 [n, d] of ids int64 [n]."""
        return self.read(np.asarray(ids, np.int64))


def read_geometry(folder: Path, manifest: Manifest) -> Geometry:
    """Read the geometry of an opened export's sampler, with its float32 statistics.

    Raises ManifestError for a table that the manifest does not describe, and for files that changed.
    """
    sampler = manifest.sampler
    if sampler.options.metric == "uniform" or sampler.hidden_size is None:
        return Geometry.uniform()
    if sampler.table is None:
        raise ManifestError(
            f"the token distances of {folder} cannot be read: its table is looked up by {sampler.table_form}."
        )

    def array(stored: StoredArray) -> np.ndarray:
        entry = manifest.files.get(stored.file)
        if entry is None or stored.offset + stored.nbytes > entry.size:
            raise ManifestError(
                f"the manifest of {folder} states {stored.nbytes} bytes of the table at {stored.offset} of "
                f"{stored.file}, which has no such bytes; export it again."
            )
        with open_listed(folder, stored.file, entry) as stream:
            data = map_stream(stream)
        count = stored.nbytes // np.dtype(_NUMPY_TYPES[stored.dtype]).itemsize
        return np.frombuffer(data, _NUMPY_TYPES[stored.dtype], count, stored.offset).reshape(stored.shape)

    table: Any = TokenTable((sampler.vocab_size, sampler.hidden_size), _row_reader(sampler.table, array))
    statistics = array(sampler.table.mean), array(sampler.table.inverse_std)
    return Geometry.from_embeddings(table, sampler.options.metric, statistics)


def _row_reader(
    table: EmbeddingTable, array: Callable[[StoredArray], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from ids, int64 [n], to rows of a table, float32 [n, d]."""
    rows = array(table.rows).T if table.transposed else array(table.rows)
    if table.scales is None:
        return lambda ids: _as_float(rows[ids])
    scales = array(table.scales)
    zero_points = None if table.zero_points is None else array(table.zero_points)

    def read(ids: np.ndarray) -> np.ndarray:
        codes = _unpack_codes(rows[ids], table.bits).astype(np.float32)  # [n, d]
        columns = np.arange(codes.shape[1]) // table.block_size
        if zero_points is None:
            codes -= 1 << (table.bits - 1)
        else:
            codes -= _unpack_codes(zero_points[ids], table.bits)[:, columns]
        return np.asarray(codes * _as_float(scales[ids])[:, columns])

    return read


def _as_float(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:  # bfloat16: the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _unpack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes uint8 [n, d * bits / 8] to uint8 [n, d], the low half of a byte first."""
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)

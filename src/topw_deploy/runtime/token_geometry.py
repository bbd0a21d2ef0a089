"""Distances between a model's tokens, from the embedding table and the statistics of its sampler node.

onnxruntime reports neither, so both are read from the graph's file (docs/contract/graph.md, section 8). A table's rows
are read on demand; no table is loaded whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import ManifestError
from topw_deploy.files import map_stream
from topw_deploy.manifest import MODEL_NAME, Manifest, open_listed
from topw_deploy.onnx_file.model import Graph, Node, read_graph
from topw_deploy.sampling import Geometry

_OPERATOR = "TopWSample"
_MEAN, _INVERSE_STD, _TABLE = 14, 15, 17  # inputs of the node
_NUMPY_TYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16", "uint8": "uint8"}
_GATHER = "Gather(axis=0)"
_QUANTISED = re.compile(
    r"com\.microsoft\.GatherBlockQuantized\(bits=(4|8),block_size=(\d+),gather_axis=0,quantize_axis=1\)"
)

RowReader = Callable[[np.ndarray], np.ndarray]
"""A function from ids, int64 [n], to rows of a table, float32 [n, d]."""


def read_geometry(folder: Path, manifest: Manifest) -> Geometry:
    """Read the geometry of an opened export's sampler, with its float32 statistics.

    The table may be one of `Gather` in float32, float16 or bfloat16, plain or transposed, or one of
    `GatherBlockQuantized` in uint8. Raises ManifestError for any other table, and for files that changed.
    """
    sampler = manifest.sampler
    if sampler.options.metric == "uniform" or sampler.hidden_size is None:
        return Geometry.uniform()
    tensors = _GraphTensors.read(folder, manifest)
    node = next((each for each in tensors.graph.nodes if each.op_type == _OPERATOR), None)
    if node is None or len(node.inputs) <= _TABLE:
        raise ManifestError(f"{folder / MODEL_NAME} has no sampler node with an embedding table; export it again.")
    mean, inverse_std = (tensors.array(node.inputs[place]) for place in (_MEAN, _INVERSE_STD))
    shape = (sampler.vocab_size, sampler.hidden_size)
    table: Any = TokenTable(shape, tensors.row_reader(node, sampler.table_form))
    _check_sizes(table, (mean, inverse_std), folder)
    return Geometry.from_embeddings(table, sampler.options.metric, (mean, inverse_std))


@dataclass(frozen=True)
class TokenTable:
    """An embedding table as an array-like [V, d] whose rows are read on demand."""

    shape: tuple[int, int]
    read: RowReader

    def __getitem__(self, ids: Any) -> np.ndarray:
        """The rows float32 [n, d] of ids int64 [n]."""
        return self.read(np.asarray(ids, np.int64))


def _check_sizes(table: TokenTable, statistics: Sequence[np.ndarray], folder: Path) -> None:
    """Raises ManifestError if the table or the statistics have other sizes than the manifest states."""
    rows, width = table.shape
    try:
        last_row = table[[rows - 1]]
    except IndexError:
        last_row = np.empty(0)
    if last_row.shape != (1, width) or any(array.shape != (width,) for array in statistics):
        raise ManifestError(
            f"the manifest of {folder} states {rows} tokens and embeddings of width {width}, but the graph's table or "
            "its statistics have other sizes; export it again."
        )


@dataclass(frozen=True)
class _GraphTensors:
    """The initializers of a graph, in its file and its data files, which are mapped into memory."""

    folder: Path
    manifest: Manifest
    graph: Graph

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> _GraphTensors:
        return cls(folder, manifest, read_graph(_map_listed_file(folder, manifest, MODEL_NAME)))

    def array(self, name: str) -> np.ndarray:
        """The array of an initializer, bfloat16 as uint16.

        Raises ManifestError for an unknown initializer, and for one that is not stored as bytes.
        """
        tensor = self.graph.constants.get(name)
        if tensor is None or tensor.dtype not in _NUMPY_TYPES:
            raise self._unreadable_error(name)
        dtype = np.dtype(_NUMPY_TYPES[tensor.dtype])
        count = int(np.prod(tensor.shape, dtype=np.int64))
        if tensor.raw is not None:
            data, start = tensor.raw, 0
        elif "location" in tensor.external and (offset := tensor.external.get("offset", "0")).isdecimal():
            data = _map_listed_file(self.folder, self.manifest, tensor.external["location"])
            start = int(offset)
        else:
            raise self._unreadable_error(name)
        if not 0 <= start <= len(data) - count * dtype.itemsize:
            raise self._unreadable_error(name)
        return np.frombuffer(data, dtype, count, start).reshape(tensor.shape)

    def row_reader(self, node: Node, form: str) -> RowReader:
        """A reader of the rows of the node's table. form: the operator that looks rows up."""
        if form == _GATHER:
            return self._plain_reader(node.inputs[_TABLE])
        quantised = _QUANTISED.fullmatch(form)
        if quantised is None:
            raise ManifestError(
                f"the token distances of {self.folder} cannot be read: its table is looked up by {form}."
            )
        return self._quantised_reader(node.inputs[_TABLE:], int(quantised[1]), int(quantised[2]))

    def _plain_reader(self, name: str) -> RowReader:
        made_by = next((each for each in self.graph.nodes if name in each.outputs), None)
        if made_by is not None and made_by.op_type == "Transpose":
            return _float_reader(self.array(made_by.inputs[0]).T)
        return _float_reader(self.array(name))

    def _quantised_reader(self, inputs: Sequence[str], bits: int, block: int) -> RowReader:
        codes, scales = self.array(inputs[0]), self.array(inputs[1])
        zeros = self.array(inputs[2]) if len(inputs) > 2 and inputs[2] else None
        if codes.dtype != np.uint8:
            raise self._unreadable_error(inputs[0])
        middle = 1 << (bits - 1)

        def read(ids: np.ndarray) -> np.ndarray:
            values = _unpack_codes(codes[ids], bits).astype(np.float32)  # [n, d]
            factors = scales[ids].astype(np.float32)  # [n, blocks]
            start = (
                middle if zeros is None else _unpack_codes(zeros[ids], bits)[:, : factors.shape[1]].astype(np.float32)
            )
            columns = np.arange(values.shape[1]) // block
            offsets = start if zeros is None else np.asarray(start)[:, columns]
            return np.asarray((values - offsets) * factors[:, columns])

        return read

    def _unreadable_error(self, name: str) -> ManifestError:
        return ManifestError(f"the token distances of {self.folder} cannot be read: {name} is not stored as an array.")


def _map_listed_file(folder: Path, manifest: Manifest, name: str) -> memoryview:
    """Map a file into memory. Raises ManifestError if the manifest does not list it, or it has changed."""
    if name not in manifest.files:
        raise ManifestError(
            f"{folder} has weights in {name[:80]!r}, which its manifest does not list; export it again."
        )
    with open_listed(folder, name, manifest.files[name]) as stream:
        return memoryview(map_stream(stream))


def _float_reader(table: np.ndarray) -> RowReader:
    def read(ids: np.ndarray) -> np.ndarray:
        rows = np.asarray(table[ids])
        if rows.dtype == np.uint16:  # bfloat16: the upper half of a float32
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float32)

    return read


def _unpack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes uint8 [n, d * bits / 8] to uint8 [n, d], the low half of a byte first."""
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)

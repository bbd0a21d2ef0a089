"""Read GGUF files: a header of metadata and tensor locations, and tensors of the types that the package `gguf` decodes.

`open_gguf` turns the metadata into a temporary folder with a Hugging Face configuration and tokenizer and the file
GGUF_MARKER, which names the GGUF file. The rest of the export treats this folder as a checkpoint.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError, TokenizerError, UnsupportedModelError, one_line
from topw_deploy.export.source.files import (
    GGUF_MARKER,
    EncodedWeight,
    IntegerMatrix,
    IntegerWeight,
    Rows,
    StoredTensor,
)
from topw_deploy.export.source.gguf_models import (
    ARCHITECTURES,
    ROTARY_FACTORS,
    Architecture,
    Metadata,
    configuration,
    refused,
)
from topw_deploy.install import require

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
# The metadata's value types: number -> format of `struct`.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}
_ONE = b"\x00\x3c"  # float16
_ZERO = b"\x00\x00"


@dataclass(frozen=True)
class _Layout:
    """How a block of an integer type is stored.

    bits: of the codes in an export, 4 or 8.
    group: weights per scale.
    factors: places of the float16 scales, by name: `d`, and the minimum's.
    one: bytes (place, value) that make all of a block's codes 1.
    scales: bytes (place, value) that make the integer scales of a superblock 1 and its integer minima 0.
    """

    bits: int
    group: int
    factors: tuple[int, ...]
    one: tuple[tuple[int, bytes], ...]
    scales: tuple[tuple[int, bytes], ...] = ()

    @property
    def has_minimum(self) -> bool:
        return len(self.factors) > 1


_LAYOUTS = {
    "Q4_0": _Layout(4, 32, (0,), ((2, b"\x99" * 16),)),
    "Q5_0": _Layout(8, 32, (0,), ((2, b"\xff" * 4 + b"\x11" * 16),)),
    "Q8_0": _Layout(8, 32, (0,), ((2, b"\x01" * 32),)),
    "Q4_1": _Layout(4, 32, (0, 2), ((4, b"\x11" * 16),)),
    "Q5_1": _Layout(8, 32, (0, 2), ((4, b"\x00" * 4 + b"\x11" * 16),)),
    "Q2_K": _Layout(4, 16, (80, 82), ((16, b"\x55" * 64),), ((0, b"\x01" * 16),)),
    "Q3_K": _Layout(4, 16, (108,), ((0, b"\xff" * 32 + b"\x55" * 64),), ((96, b"\x11" * 8 + b"\xaa" * 4),)),
    "Q4_K": _Layout(4, 32, (0, 2), ((16, b"\x11" * 128),), ((4, b"\x01" * 4 + b"\x00" * 4 + b"\x01" * 4),)),
    "Q5_K": _Layout(
        8, 32, (0, 2), ((16, b"\x00" * 32 + b"\x11" * 128),), ((4, b"\x01" * 4 + b"\x00" * 4 + b"\x01" * 4),)
    ),
    # Their codes are places in a table of 16 numbers of 8 bits, of which place 8 holds 1.
    "IQ4_NL": _Layout(8, 32, (0,), ((2, b"\x88" * 16),)),
    "IQ4_XS": _Layout(8, 32, (0,), ((8, b"\x88" * 128),), ((2, b"\xaa" * 2 + b"\x11" * 4),)),
    "Q6_K": _Layout(8, 16, (208,), ((0, b"\x11" * 128 + b"\xaa" * 64),), ((192, b"\x01" * 16),)),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file.

    kind: the name of its type, such as Q4_K.
    shape: the last axis is contiguous.
    offset: in bytes, from the start of the file.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    def raw(self) -> np.ndarray:
        """Map the file: uint8 [..., bytes of a row]."""
        block, size = _type_sizes(self.kind)
        shape = (*self.shape[:-1], self.shape[-1] // block * size)
        return np.memmap(self.path, np.uint8, "r", self.offset, shape)


def _type_sizes(kind: str) -> tuple[int, int]:
    """(weights in a block, bytes of a block)."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(block), int(size)


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Decode rows, uint8 [..., bytes] -> float32 [..., weights], as the package `gguf` does."""
    from gguf import GGMLQuantizationType, dequantize

    if kind == "F64":
        return np.ascontiguousarray(raw).view(np.float64).astype(np.float32)
    with np.errstate(all="ignore"):  # a damaged scale becomes NaN or infinity, which the export refuses
        return np.asarray(dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[kind]), np.float32)


class GgufWeight(EncodedWeight):
    """A tensor that is decoded row by row.

    order: int64 [rows], the row of the file for each row of the weight; None if they are the same.
    change: applied to decoded values.
    transposed: whether the file has the weight's columns as rows.
    """

    def __init__(
        self,
        name: str,
        stored: GgufTensor,
        place: tuple[int, ...] = (),
        order: np.ndarray | None = None,
        change: Callable[[np.ndarray], np.ndarray] | None = None,
        shape: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> None:
        self.name, self.stored, self._place, self._order, self._change = name, stored, place, order, change
        self._transposed = transposed
        self.shape = shape or stored.shape[len(place) :][:: -1 if transposed else 1]

    def raw(self, rows: Rows) -> np.ndarray:
        """Return the bytes of some rows of the stored tensor, uint8 [rows, bytes]."""
        found = self.stored.raw()[self._place]
        if len(self.stored.shape) == len(self._place) + 1:  # of a vector: one element in a row
            found = found.reshape(self.shape[0], -1)
        return found[rows if self._order is None else self._order[rows]]

    def rows(self, rows: Rows) -> np.ndarray:
        values = decode(self.raw(slice(None) if self._transposed else rows), self.stored.kind)
        values = values.T[rows] if self._transposed else values
        values = values if self._change is None else self._change(values)
        # torch warns about read-only arrays, such as views of the file
        return np.require(values.reshape(-1, *self.shape[1:]), requirements=["C", "W"])


class GgufIntegers(GgufWeight, IntegerWeight):
    """A matrix of integer codes.

    The matrix has the file's rows, which are outputs, also of a transposed weight.
    Codes, scales and minima are what the decoder of `gguf` makes of blocks in which everything else is 1 or 0. So they
    decode to exactly its values.
    """

    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        layout, kind = _LAYOUTS[self.stored.kind], self.stored.kind
        _, size = _type_sizes(kind)
        raw = self.raw(rows)
        blocks = raw.reshape(len(raw), -1, size)
        shape = (len(raw), -1)

        def probe(*changes: tuple[int, bytes]) -> np.ndarray:
            changed = blocks.copy()
            for place, value in changes:
                changed[..., place : place + len(value)] = np.frombuffer(value, np.uint8)
            return decode(changed.reshape(len(raw), -1), kind)

        d, *least = layout.factors
        middle = 0 if layout.has_minimum else 1 << (layout.bits - 1)
        unit = [(d, _ONE), *layout.scales, *((place, _ZERO) for place in least)]
        codes = (probe(*unit) + middle).astype(np.uint8)
        if layout.scales:
            scales = probe(*layout.one, *((place, _ZERO) for place in least))[:, :: layout.group]
            minima = probe((d, _ZERO))[:, :: layout.group]
        else:
            scales, minima = (
                np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16).astype(np.float32).reshape(shape)
                for place in (d, least[0] if least else d)
            )
        zeros = np.full(scales.shape, middle, np.int32)
        groups = np.arange(codes.shape[1]) // layout.group
        return IntegerMatrix(
            codes, np.ascontiguousarray(scales), zeros, groups, layout.bits, minima if layout.has_minimum else None
        )


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file. metadata: arrays are lists."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> Architecture:
        """Raises UnsupportedModelError for an architecture that is not supported."""
        name = self.metadata.get("general.architecture")
        if name == "llama" and self.metadata.get("llama.expert_count"):
            name = "llama with experts"
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise refused(f"{self.path} holds a model of the architecture {name!r}, but only {known} are read")
        return ARCHITECTURES[name]

    @property
    def types(self) -> Counter[str]:
        """The number of tensors of each type."""
        return Counter(tensor.kind for tensor in self.tensors.values())

    @property
    def is_quantised(self) -> bool:
        return not self.types.keys() <= _FLOATS.keys()

    @property
    def has_gates_of_one_type(self) -> bool:
        """Whether the gate and the up matrix of each layer have the same type."""
        ends = (".ffn_gate.weight", ".ffn_up.weight")
        kinds = {(name.partition(".ffn_")[0], each.kind) for name, each in self.tensors.items() if name.endswith(ends)}
        return len(kinds) == len({layer for layer, _ in kinds})

    def types_not_kept(self) -> list[str]:
        """The quantised types whose codes MatMulNBits cannot keep."""
        return sorted(self.types.keys() - _FLOATS.keys() - _LAYOUTS.keys())

    def configuration(self) -> dict[str, Any]:
        """Return the model's config.json. Raises UnsupportedModelError for metadata that it cannot express."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

        def read(name: str) -> np.ndarray:
            return decode(self.tensors[name].raw(), self.tensors[name].kind)

        return configuration(self.path, self.architecture, self.metadata, shapes, read)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file. Raises SourceError for a damaged file or an unknown type."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError, struct.error, RecursionError, MemoryError, OverflowError) as error:
        raise SourceError(f"{path} cannot be read as GGUF ({one_line(error)}); fetch it again.") from None


class _Reader:
    """Reads the values of a header one after the other."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = self._numbers("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version} but must be {' or '.join(map(str, _VERSIONS))}")
        tensor_count, field_count = self._numbers("QQ")
        metadata = {}
        for _ in range(field_count):
            key = self._text()
            metadata[key] = self._value(*self._numbers("I"))
        entries = {}
        for _ in range(tensor_count):
            name = self._text()
            if name in entries:
                raise ValueError(f"it has two tensors {name}")
            entries[name] = self._tensor()
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._locate(name, start, *entry) for name, entry in entries.items()}
        return GgufFile(self._path, metadata, tensors)

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(f"it ends after {len(self._data)} bytes, within its header")
        self._at += size
        return self._data[self._at - size : self._at]

    def _numbers(self, kinds: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{kinds}", self._take(struct.calcsize(f"<{kinds}")))

    def _text(self) -> str:
        return self._take(*self._numbers("Q")).decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth:
            raise ValueError(f"a value has the unknown type {kind}")
        kind, count = self._numbers("IQ")
        if kind in _NUMBERS:
            width = struct.calcsize(f"<{_NUMBERS[kind]}")
            return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", self._take(count * width)))
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _tensor(self) -> tuple[int, tuple[int, ...], int]:
        """Returns (number of the type, shape, offset from the start of the data)."""
        (rank,) = self._numbers("I")
        if not 1 <= rank <= _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {rank} dimensions")
        sizes, (kind, offset) = self._numbers(f"{rank}Q"), self._numbers("IQ")
        return kind, sizes[::-1], offset

    def _locate(self, name: str, start: int, number: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        from gguf import GGMLQuantizationType

        if number not in [kind.value for kind in GGMLQuantizationType]:
            raise ValueError(f"the tensor {name} has the unknown type {number}")
        kind = GGMLQuantizationType(number).name
        block, size = _type_sizes(kind)
        if not all(shape) or shape[-1] % block:
            raise ValueError(f"the tensor {name} has the shape {shape}, but {kind} has blocks of {block}")
        end = start + offset + math.prod(shape) // block * size
        if end > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes, but the tensor {name} ends at {end}")
        return GgufTensor(self._path, kind, shape, start + offset)


def checkpoint_tensors(file: GgufFile) -> dict[str, StoredTensor | EncodedWeight]:
    """Return the tensors by the names of the transformers model. Nothing is read yet.

    Raises UnsupportedModelError for a tensor that the architecture does not have, or whose type cannot be decoded.
    """
    architecture, found = file.architecture, {}
    shapes = {name: stored.shape for name, stored in file.tensors.items()}
    for name, stored in file.tensors.items():
        if name in ROTARY_FACTORS:
            continue
        placed = dict(architecture.place(name, shapes, file.metadata))
        if not placed:
            raise refused(f"{file.path} holds the tensor {name}, which is unknown for this architecture")
        _check_decodable(file.path, name, stored.kind)
        for full, how in placed.items():
            found[full] = _weight(full, stored, how)
    return found


def _weight(name: str, stored: GgufTensor, how: Mapping[str, Any]) -> StoredTensor | EncodedWeight:
    if stored.kind in _FLOATS and not how:
        width = _type_sizes(stored.kind)[1]
        return StoredTensor(stored.path, stored.offset, stored.kind, stored.shape, math.prod(stored.shape) * width)
    matrix = len(stored.shape) - len(how.get("place", ())) == 2
    keeps = matrix and stored.kind in _LAYOUTS and not how.keys() & {"change", "shape"}
    kind = GgufIntegers if keeps else GgufWeight
    return kind(name, stored, **how)


def _check_decodable(path: Path, name: str, kind: str) -> None:
    _, size = _type_sizes(kind)
    try:
        decode(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{path} stores {name} as {kind}, which the package gguf cannot decode; choose a file of other types."
        ) from None


_opened: dict[tuple[Path, int, int], tempfile.TemporaryDirectory[str]] = {}  # deleted when the process ends


def open_gguf(path: Path) -> Path:
    """Return a folder with the configuration, the tokenizer and the chat template in a GGUF file, and GGUF_MARKER.

    The folder exists until the process ends. Raises MissingPackageError without the package `gguf`, SourceError for a
    damaged file, UnsupportedModelError for one that is not supported, and TokenizerError if its tokenizer is not.
    """
    require("reading GGUF files", "gguf")
    path = path.resolve()
    state = path.stat()
    key = (path, state.st_size, state.st_mtime_ns)
    if key not in _opened:
        file, folder = read_gguf(path), tempfile.TemporaryDirectory(prefix="topw-gguf-")
        config = file.configuration()
        for name, data in ((GGUF_MARKER, {"file": os.fspath(path)}), ("config.json", config)):
            (Path(folder.name) / name).write_text(json.dumps(data), encoding="utf-8")
        _write_tokenizer(path, Path(folder.name))
        _opened[key] = folder
    return Path(_opened[key].name)


def _write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer that transformers makes of the file's metadata."""
    from transformers import PreTrainedTokenizerFast

    try:
        made = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        made.save_pretrained(folder)
    except Exception as error:  # the conversion is not written for damaged metadata, and can raise any error
        raise TokenizerError(
            f"the tokenizer in {path} cannot be converted ({type(error).__name__}: {one_line(error)}); export the "
            "model's Hugging Face checkpoint."
        ) from error

"""Read configuration files, and locate a checkpoint's tensors in safetensors or PyTorch's files without reading them.

PyTorch's `pytorch_model.bin` is a zip archive of uncompressed records: a pickle that describes the tensors, and the
tensors' bytes. torch reads the pickle with `weights_only`, so that it builds nothing but tensors, and maps the file, so
that the bytes stay in it. Only files of PyTorch before 1.6 are read into memory.
"""

from __future__ import annotations

import json
import os
import zipfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.errors import SourceError, one_line
from topw_deploy.folders import is_file_name, open_regular, read_bounded
from topw_deploy.safetensors_header import LARGEST_HEADER, METADATA, read_entry, read_header, refuse_overlap

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    each.safetensors: ir.DataType(each.number).numpy() for each in ELEMENT_TYPES.values() if each.safetensors
}
"""safetensors' name of an element type -> the dtype of NumPy or ml_dtypes, whose name is also torch's."""


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor in a file.

    offset, nbytes: in bytes.
    dtype: a key of NUMPY_TYPES.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def array(self, mode: Literal["r", "c"] = "r") -> np.ndarray:
        """Memory-map the tensor: read-only with mode `r`, copy-on-write with mode `c`."""
        if self.nbytes == 0:
            return np.empty(self.shape, NUMPY_TYPES[self.dtype])
        return np.memmap(self.path, NUMPY_TYPES[self.dtype], mode, self.offset, self.shape)


@dataclass(frozen=True)
class TorchTensor(StoredTensor):
    """A tensor that torch has read or mapped. offset: its address, which tells tensors of one file apart."""

    values: np.ndarray = field(compare=False)

    def array(self, mode: Literal["r", "c"] = "r") -> np.ndarray:
        return self.values.copy() if mode == "c" else self.values


Rows = Any
"""A NumPy index of the first axis: a slice, or an integer array."""


class EncodedWeight(ABC):
    """A weight that must be decoded before the model can compute with it.

    name: the name of the weight's main tensor in the checkpoint.
    shape: the shape after decoding.
    """

    name: str
    shape: tuple[int, ...]

    @abstractmethod
    def rows(self, rows: Rows) -> np.ndarray:
        """Decode the given rows to float32, without reading others.

        Raises SourceError for values that cannot be decoded.
        """

    def read(self, index: Any) -> np.ndarray:
        """Return the float32 values at a NumPy index.

        Reads whole rows: only the first axis of the index saves reading.
        """
        rows, others = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        found = self.rows(slice(None) if rows is ... else rows)
        return found[(slice(None), *others)] if others else found


@dataclass(frozen=True)
class IntegerMatrix:
    """A weight as integer codes: (code - zero) * scale, plus a minimum if there is one.

    codes: uint8 [outputs, inputs].
    scales: float32 [outputs, groups].
    zeros: int32 [outputs, groups].
    groups: int64 [inputs], the group of each input.
    bits: bits of a code, 4 or 8.
    minima: float32 [outputs, groups], or None.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray
    bits: int
    minima: np.ndarray | None = None

    def weight(self) -> np.ndarray:
        """The decoded weight, float32 [outputs, inputs]. Exact for scales of at most 16 significant bits."""
        steps = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        weight = steps * self.scales[:, self.groups]
        return weight if self.minima is None else weight + self.minima[:, self.groups]


class IntegerWeight(EncodedWeight):
    """A weight stored as integer codes, which MatMulNBits can use unchanged."""

    @abstractmethod
    def matrix(self, rows: Rows = slice(None)) -> IntegerMatrix:
        """Return the codes, scales and zero points of some rows."""

    def rows(self, rows: Rows) -> np.ndarray:
        return self.matrix(rows).weight()


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack codes from words, lowest bits first: int32 [n, m] -> uint8 [n, m * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.astype(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return wide.astype(np.uint8).reshape(len(words), -1)


_MOST_JSON = 16 << 20  # bytes of a configuration file


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, {} if the file is missing. Raises SourceError for any other content."""
    try:
        data = json.loads(read_bounded(path, _MOST_JSON, follow=True).decode("utf-8"))
        json.dumps(data, ensure_ascii=False).encode("utf-8")  # raises for a lone surrogate, which UTF-8 cannot hold
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); repair it.") from None
    if not isinstance(data, dict):
        raise SourceError(f"{path} holds a {type(data).__name__}, not an object; repair it.")
    return data


GGUF_MARKER = "topw_gguf.json"


def gguf_path(folder: Path) -> Path | None:
    """The GGUF file that `folder` was made from by `gguf.open_gguf`; None for any other folder."""
    path = read_json(folder / GGUF_MARKER).get("file")
    return None if path is None else Path(str(path))


def json_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object, else {}."""
    return value if isinstance(value, dict) else {}


# Names of the part of a composite model's config.json that describes the text decoder, or holds that part.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _nested_text(config: dict[str, Any]) -> dict[str, Any] | None:
    return next((part for name in _TEXT_PARTS if isinstance(part := config.get(name), dict)), None)


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a composite model's config.json, or the whole of a text model's."""
    part = _nested_text(config)
    return config if part is None else text_part(part)


def special_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens that a config.json states: the root's, else the text part's.

    This is transformers' order. A null states nothing, and neither do the defaults of transformers' classes.
    """
    part = _nested_text(config)
    of_part = {} if part is None else special_ids(part)
    return of_part | {name: config[name] for name in SPECIAL_IDS if config.get(name) is not None}


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TORCH_INDEX, TORCH_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_TORCH_SUFFIX = ".bin"
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pth", INDEX, TORCH_INDEX)


def _main_file(folder: Path) -> Path:
    """Return the file of weights, or the index of such files, that transformers reads.

    This is the one that config.json names, else safetensors rather than PyTorch's files, and one file rather than an
    index. Raises SourceError if there is none.
    """
    named = read_json(folder / "config.json").get("transformers_weights")
    names = (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX) if named is None else (named,)
    found = next((folder / name for name in names if is_file_name(name) and (folder / name).is_file()), None)
    if found is not None:
        return found
    if named is not None:
        raise SourceError(
            f"{folder / 'config.json'} states transformers_weights {named!r}, but no such file is beside it; fetch it."
        )
    shards = sorted(file.name for pattern in _WEIGHT_FILES for file in folder.glob(pattern))
    besides = f"{shards[0]} but no index, and " if shards else ""
    raise SourceError(
        f"{folder} holds {besides}neither {SINGLE} nor {TORCH_SINGLE}; fetch the weights, or give the table with "
        "--embeddings."
    )


def _indexed_files(index: Path) -> dict[str, Path]:
    """Return the file of each tensor in an index, by the tensor's name."""
    try:
        weight_map = json.loads(read_bounded(index, LARGEST_HEADER, follow=True).decode("utf-8"))["weight_map"]
        return {str(name): index.parent / Path(str(file)).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{index} is damaged ({error}); fetch it again.") from None


def unread_files_notices(folder: Path) -> list[str]:
    """Return a notice if `folder` holds other files of weights than those that transformers and this package read."""
    main = _main_file(folder)
    read = {main, *(_indexed_files(main).values() if main.suffix == ".json" else ())}
    others = sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)} - read)
    if not others:
        return []
    which = f"{others[0].name} and {len(others) - 1} other files" if len(others) > 1 else others[0].name
    notice = f"only {main.name} was read, as by transformers, and not {which} of weights beside it"
    return [f"{notice}; vLLM reads the shards of {INDEX} instead" if folder / INDEX in others else notice]


def stored_tensors(folder: Path, ends: tuple[str, ...] = ("",)) -> dict[str, StoredTensor]:
    """Return the locations of the tensors in `folder` whose names end so, by name. Reads no file without such tensors.

    Raises SourceError for missing or damaged files.
    """
    main = _main_file(folder)
    if main.suffix == ".json":
        return _indexed_tensors(main, ends)
    return {name: found for name, found in _tensors_in(main).items() if name.endswith(ends)}


def _indexed_tensors(index: Path, ends: tuple[str, ...]) -> dict[str, StoredTensor]:
    files = _indexed_files(index)
    names = {name: path for name, path in files.items() if name.endswith(ends)}
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(set(names.values())):
        if not path.exists():
            raise SourceError(f"{index} lists {path.name}, which is missing; fetch the files that belong together.")
        found = _tensors_in(path)
        if ends == ("",):  # like transformers, reads a shard's tensors that the index lacks
            tensors |= {name: tensor for name, tensor in found.items() if name not in files}
        for name in [name for name in names if names[name] == path]:
            if name not in found:
                raise SourceError(f"{path} lacks the tensor {name} of its index; fetch it again.")
            tensors[name] = found[name]
    return tensors


def _tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Return the locations of all tensors in a file, by name."""
    if path.suffix == _TORCH_SUFFIX:
        return tensors_in_torch_file(path)
    try:
        with open_regular(path, follow=True) as stream:
            size = os.fstat(stream.fileno()).st_size
            header, start = read_header(stream, size)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is not a safetensors file ({error}); fetch it again.") from None
    try:
        entries = {name: read_entry(name, entry) for name, entry in header.items() if name != METADATA}
        refuse_overlap(entries)
        end = start + max((entry.end for entry in entries.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes, but its last tensor ends at {end}")
    except ValueError as error:
        raise SourceError(f"{path} is damaged ({error}); fetch it again.") from None
    return {
        name: StoredTensor(path, start + entry.begin, entry.dtype, entry.shape, entry.end - entry.begin)
        for name, entry in entries.items()
    }


_SAFETENSORS_NAMES = {kind.name: name for name, kind in NUMPY_TYPES.items()}


def tensors_in_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors in a file, by name, without reading the bytes of those that the file stores uncompressed.

    Raises SourceError for code in the file, compressed records, and anything but tensors.
    """
    import torch

    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _refuse_compression(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except SourceError:
        raise
    except Exception as error:  # noqa: BLE001  # reading an archive or a pickle can raise any error
        raise SourceError(
            f"{path} holds more than tensors, or is damaged ({one_line(error, 120)}); fetch it again, or convert the "
            "weights to safetensors where you trust the file."
        ) from None
    if not isinstance(found, dict):
        raise SourceError(f"{path} holds a {type(found).__name__}, not tensors by name; save the model's state_dict.")
    tensors: dict[str, StoredTensor] = {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise SourceError(
                f"{path} holds {name} of type {type(value).__name__} beside tensors; save the model's state_dict alone."
            )
        kind = _SAFETENSORS_NAMES.get(str(value.dtype).removeprefix("torch."))
        if kind is None:
            raise SourceError(f"{path} stores {name} in type {value.dtype}; convert the weights to safetensors.")
        shape, flat = tuple(value.shape), value.contiguous().reshape(-1)
        values = flat.view(torch.uint8).numpy().view(NUMPY_TYPES[kind]).reshape(shape)
        tensors[str(name)] = TorchTensor(path, flat.data_ptr(), kind, shape, values.nbytes, values)
    return tensors


def _refuse_compression(path: Path) -> None:
    """Raises SourceError for a compressed record: a small one can unpack to any size."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED:
                raise SourceError(f"{path} has compressed records ({record.filename}); load and save it with PyTorch.")

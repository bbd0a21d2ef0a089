"""Lay out weights in data files, and write these so that an interrupted export can resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import onnx_ir as ir

from topw_deploy.export.graph import BLOCK_BYTES, byte_blocks, constant_of
from topw_deploy.progress import Advance

DATA_FILE = "model.onnx_data"
_OTHER_DATA_FILE = "model.topw.onnx_data"  # if the decoder's own data has a name made from DATA_FILE
_INLINE_BELOW = (
    1024  # bytes: smaller tensors stay in the graph, because shape inference needs shapes, axes and scalars there
)
_PAGE = 4096  # bytes: tensors larger than _ALIGNED_ABOVE start on a page, so that they can be mapped
_ALIGNED_ABOVE = 1 << 20  # bytes, as in onnx_ir


@dataclass(frozen=True)
class Slot:
    """The place of a weight in a data file. offset, length: in bytes."""

    value: ir.Value
    file: str
    offset: int
    length: int

    @property
    def tensor(self) -> ir.TensorProtocol:
        return constant_of(self.value)

    @property
    def name(self) -> str:
        return str(self.value.name)


class Log(Protocol):
    """A log of the weights written so far, so that an interrupted export can resume."""

    def written_weights(self, file: str, layout: str, /) -> list[tuple[str, str]]:
        """Return (name, SHA-256) of each weight that `file` holds in this layout, in order."""

    def record_start(self, file: str, layout: str, kept: list[tuple[str, str]], /) -> None:
        """Record that writing of `file` starts, after the weights `kept` that it holds already."""

    def record_weight(self, file: str, name: str, digest: str, /) -> None:
        """Record that the next weight of `file` was written."""

    def record_end(self, file: str, digest: str, /) -> None:
        """Record that `file` is complete."""


class NullLog:
    """A Log that records nothing."""

    def written_weights(self, _file: str, _layout: str) -> list[tuple[str, str]]:
        return []

    def record_start(self, _file: str, _layout: str, _kept: list[tuple[str, str]]) -> None: ...

    def record_weight(self, _file: str, _name: str, _digest: str) -> None: ...

    def record_end(self, _file: str, _digest: str) -> None: ...


def lay_out(values: Iterable[ir.Value], taken: Iterable[str] = (), max_shard_size: int | None = None) -> list[Slot]:
    """Assign a slot to each weight of at least 1 KiB, in order.

    taken: names of the decoder's own data files, which no slot uses.
    max_shard_size: maximum bytes of a file, exceeded only by a single larger weight; None writes one file.
    """
    slots: list[tuple[ir.Value, int, int, int]] = []
    shard = end = 0
    for value in values:
        tensor = constant_of(value)
        if tensor.nbytes < _INLINE_BELOW:
            continue
        offset = _aligned_offset(end, tensor.nbytes)
        if max_shard_size is not None and end > 0 and offset + tensor.nbytes > max_shard_size:
            shard, offset = shard + 1, 0
        end = offset + tensor.nbytes
        slots.append((value, shard, offset, tensor.nbytes))
    names = _file_names(DATA_FILE, shard + 1)
    if not set(names).isdisjoint(taken):
        names = _file_names(_OTHER_DATA_FILE, shard + 1)
    return [Slot(value, names[index], offset, length) for value, index, offset, length in slots]


def file_sizes(slots: Iterable[Slot]) -> dict[str, int]:
    """Return {file name: bytes}."""
    sizes: dict[str, int] = {}
    for slot in slots:
        sizes[slot.file] = slot.offset + slot.length
    return sizes


def external_tensor(slot: Slot, folder: Path) -> ir.ExternalTensor:
    """Return a tensor that refers to the slot's bytes in `folder`."""
    tensor = slot.tensor
    shape = ir.Shape([int(size) for size in tensor.shape])
    return ir.ExternalTensor(
        slot.file, slot.offset, slot.length, tensor.dtype, shape=shape, name=slot.name, base_dir=folder
    )


def write_data(slots: list[Slot], folder: Path, log: Log, advance: Advance) -> None:
    """Write the data files of all slots, in parts of at most `BLOCK_BYTES` bytes where possible.

    log: weights that the log names and whose hashes are unchanged are not written again, so that a call can resume
        after an OSError.
    advance: called with the number of bytes of each part.
    """
    for file in dict.fromkeys(slot.file for slot in slots):
        _write_file(folder / file, [slot for slot in slots if slot.file == file], log, advance)


def _write_file(path: Path, slots: list[Slot], log: Log, advance: Advance) -> None:
    layout = _layout_digest(slots)
    if path.is_file() and path.stat().st_nlink > 1:
        path.unlink()  # writing through a hard link would change the source
    logged = log.written_weights(path.name, layout) if path.is_file() else []
    with path.open("r+b" if logged else "w+b") as stream:
        kept, file_hash = _keep_intact_weights(stream, slots, logged, advance)
        stream.truncate()
        log.record_start(path.name, layout, logged[:kept])
        for slot in slots[kept:]:
            gap = bytes(slot.offset - stream.tell())
            stream.write(gap)
            file_hash.update(gap)
            log.record_weight(path.name, slot.name, _write_weight(stream, slot, file_hash, advance))
    log.record_end(path.name, file_hash.hexdigest())


def _write_weight(stream: BinaryIO, slot: Slot, file_hash: Any, advance: Advance) -> str:
    weight_hash = hashlib.sha256()
    for part in byte_blocks(slot.tensor):
        stream.write(part)
        file_hash.update(part)
        weight_hash.update(part)
        advance(len(part))
    if stream.tell() != slot.offset + slot.length:
        raise ValueError(f"{slot.name} has {stream.tell() - slot.offset} bytes instead of {slot.length}")
    stream.flush()
    return weight_hash.hexdigest()


def _keep_intact_weights(
    stream: BinaryIO, slots: list[Slot], logged: list[tuple[str, str]], advance: Advance
) -> tuple[int, Any]:
    """Count the intact weights at the start of `stream`, and position it after them.

    Returns (count, hash of the bytes).
    """
    kept, file_hash = 0, hashlib.sha256()
    for slot, (name, digest) in zip(slots, logged, strict=False):
        start, weight_hash, after, left = stream.tell(), hashlib.sha256(), file_hash.copy(), slot.length
        after.update(stream.read(slot.offset - start))
        while left and (part := stream.read(min(BLOCK_BYTES, left))):
            weight_hash.update(part)
            after.update(part)
            left -= len(part)
        if left or name != slot.name or weight_hash.hexdigest() != digest:
            stream.seek(start)
            break
        kept, file_hash = kept + 1, after
        advance(slot.length)
    return kept, file_hash


def _aligned_offset(end: int, size: int) -> int:
    return -(-end // _PAGE) * _PAGE if size > _ALIGNED_ABOVE else end


def _file_names(name: str, count: int) -> list[str]:
    """`name` for one file; `model-00001-of-00002.onnx_data`, ... for several."""
    stem, _, suffix = name.partition(".")
    return [f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}" for index in range(count)] if count > 1 else [name]


def _layout_digest(slots: list[Slot]) -> str:
    lines = (f"{s.name} {s.offset} {s.length} {s.tensor.dtype.name} {list(s.tensor.shape)}\n" for s in slots)
    return hashlib.sha256("".join(lines).encode()).hexdigest()

"""Lay out and resumably write data files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import onnx_ir as ir

from topw_deploy.export.graph.editor import constant_of
from topw_deploy.export.graph.lazy_weight import PART, parts
from topw_deploy.progress import Advance

DATA_FILE = "model.onnx_data"
_OTHER_DATA_FILE = "model.topw.onnx_data"  # if the decoder's own data has a name made from DATA_FILE
_INLINE_BELOW = 1024  # bytes: shape inference needs shapes, axes and scalars inline
_PAGE = 4096  # alignment of mapped tensors ...
_ALIGNED_ABOVE = 1 << 20  # ... above this size, as in onnx_ir


@dataclass(frozen=True)
class Slot:
    """A weight's location in `file`, in bytes."""

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
    """Log of written weights."""

    def written(self, file: str, layout: str, /) -> list[tuple[str, str]]:
        """Names and SHA-256 of weights in `file` with this layout."""

    def began(self, file: str, layout: str, kept: list[tuple[str, str]], /) -> None:
        """Record the start of `file` with `kept` weights."""

    def wrote(self, file: str, name: str, digest: str, /) -> None:
        """Record the next weight."""

    def finished(self, file: str, digest: str, /) -> None:
        """Record a complete file."""


class NoLog:
    """A Log that records nothing."""

    def written(self, _file: str, _layout: str) -> list[tuple[str, str]]:
        return []

    def began(self, _file: str, _layout: str, _kept: list[tuple[str, str]]) -> None: ...

    def wrote(self, _file: str, _name: str, _digest: str) -> None: ...

    def finished(self, _file: str, _digest: str) -> None: ...


def lay_out(values: Iterable[ir.Value], taken: Iterable[str] = (), max_shard_size: int | None = None) -> list[Slot]:
    """Assign slots to large `values`, in order.

    taken: existing data files.
    max_shard_size: maximum bytes per file, exceeded only by a single larger weight; None: one file.
    """
    slots: list[tuple[ir.Value, int, int, int]] = []
    shard = end = 0
    for value in values:
        tensor = constant_of(value)
        if tensor.nbytes < _INLINE_BELOW:
            continue
        offset = _aligned(end, tensor.nbytes)
        if max_shard_size is not None and end > 0 and offset + tensor.nbytes > max_shard_size:
            shard, offset = shard + 1, 0
        end = offset + tensor.nbytes
        slots.append((value, shard, offset, tensor.nbytes))
    names = _file_names(DATA_FILE, shard + 1)
    if not set(names).isdisjoint(taken):
        names = _file_names(_OTHER_DATA_FILE, shard + 1)
    return [Slot(value, names[index], offset, length) for value, index, offset, length in slots]


def file_sizes(slots: Iterable[Slot]) -> dict[str, int]:
    """File name -> bytes."""
    sizes: dict[str, int] = {}
    for slot in slots:
        sizes[slot.file] = slot.offset + slot.length
    return sizes


def external(slot: Slot, folder: Path) -> ir.ExternalTensor:
    tensor = slot.tensor
    shape = ir.Shape([int(size) for size in tensor.shape])
    return ir.ExternalTensor(
        slot.file, slot.offset, slot.length, tensor.dtype, shape=shape, name=slot.name, base_dir=folder
    )


def write_data(slots: list[Slot], folder: Path, log: Log, advance: Advance) -> None:
    """Write all slots, in parts of at most `PART` bytes where possible.

    log: weights in the log with unchanged hashes are kept, so that a call can resume after an OSError.
    advance: called with the number of bytes of each part.
    """
    for file in dict.fromkeys(slot.file for slot in slots):
        _write_file(folder / file, [slot for slot in slots if slot.file == file], log, advance)


def _write_file(path: Path, slots: list[Slot], log: Log, advance: Advance) -> None:
    layout = _layout_digest(slots)
    if path.is_file() and path.stat().st_nlink > 1:
        path.unlink()  # writing through a hard link would change the source
    before = log.written(path.name, layout) if path.is_file() else []
    with path.open("r+b" if before else "w+b") as stream:
        kept, whole = _kept(stream, slots, before, advance)
        stream.truncate()
        log.began(path.name, layout, before[:kept])
        for slot in slots[kept:]:
            gap = bytes(slot.offset - stream.tell())
            stream.write(gap)
            whole.update(gap)
            log.wrote(path.name, slot.name, _write_weight(stream, slot, whole, advance))
    log.finished(path.name, whole.hexdigest())


def _write_weight(stream: BinaryIO, slot: Slot, whole: Any, advance: Advance) -> str:
    own = hashlib.sha256()
    for part in parts(slot.tensor):
        stream.write(part)
        whole.update(part)
        own.update(part)
        advance(len(part))
    if stream.tell() != slot.offset + slot.length:
        raise ValueError(f"{slot.name} has {stream.tell() - slot.offset} bytes instead of {slot.length}")
    stream.flush()
    return own.hexdigest()


def _kept(stream: BinaryIO, slots: list[Slot], before: list[tuple[str, str]], advance: Advance) -> tuple[int, Any]:
    """(number, hash) of the intact weights at the start of `stream`, which is then positioned after them."""
    kept, whole = 0, hashlib.sha256()
    for slot, (name, digest) in zip(slots, before, strict=False):
        start, own, after, left = stream.tell(), hashlib.sha256(), whole.copy(), slot.length
        after.update(stream.read(slot.offset - start))
        while left and (part := stream.read(min(PART, left))):
            own.update(part)
            after.update(part)
            left -= len(part)
        if left or name != slot.name or own.hexdigest() != digest:
            stream.seek(start)
            break
        kept, whole = kept + 1, after
        advance(slot.length)
    return kept, whole


def _aligned(end: int, size: int) -> int:
    return -(-end // _PAGE) * _PAGE if size > _ALIGNED_ABOVE else end


def _file_names(name: str, count: int) -> list[str]:
    """`name` for one file; `model-00001-of-00002.onnx_data`, ... for several."""
    stem, _, suffix = name.partition(".")
    return [f"{stem}-{index + 1:05d}-of-{count:05d}.{suffix}" for index in range(count)] if count > 1 else [name]


def _layout_digest(slots: list[Slot]) -> str:
    lines = (f"{s.name} {s.offset} {s.length} {s.tensor.dtype.name} {list(s.tensor.shape)}\n" for s in slots)
    return hashlib.sha256("".join(lines).encode()).hexdigest()

"""Special files in place of regular ones, and an alarm for hangs."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import resource
import signal
import socket
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from topw_deploy.errors import TopWError
from topw_deploy.manifest import MANIFEST_NAME

_HANG = 120  # seconds: a pipe would block forever


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # socket addresses have at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def _linked_pipe(path: Path) -> None:
    outside = path.parents[2] / f"pipe-{uuid.uuid4().hex}"
    os.mkfifo(outside)
    path.symlink_to(outside)


def _link_outside(path: Path) -> None:
    outside = path.parents[2] / f"file-{uuid.uuid4().hex}"
    outside.write_bytes(b"{}")
    path.symlink_to(outside)


def _link_inside(path: Path) -> None:
    path.with_name("another.json").write_bytes(b"{}")
    path.symlink_to("another.json")


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": _socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": _linked_pipe,
}
"""Functions that make a file that must not be opened."""

OTHERS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a link to a file outside": _link_outside,
    "a link to a file inside": _link_inside,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
"""Functions that make something other than a regular file in the folder."""


@contextmanager
def no_hang() -> Iterator[None]:
    """Fail a block that waits for too long: raise in Python code, or end the process if a library waits."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError("it waits forever")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(_HANG)
    faulthandler.dump_traceback_later(2 * _HANG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


MEMORY = 1 << 30
"""Bytes by which a process may grow while it refuses a small file. Without limits, each attack takes far more."""
_LONGEST = 1000  # characters of a message; one lists all parameters
SENTENCE = re.compile(r"[^\n]+")


@contextmanager
def refused(kind: type[TopWError], match: str) -> Iterator[None]:
    """Assert that the block raises `kind` with a message of one line, and neither hangs nor fills the memory."""
    before = _peak()
    with no_hang(), pytest.raises(kind, match=match) as caught:
        yield
    said = str(caught.value)
    assert SENTENCE.fullmatch(said), said
    assert len(said) <= _LONGEST, said
    assert _peak() - before < MEMORY


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def put(folder: Path, name: str, data: bytes | str) -> Path:
    """Write a file of an export and list it in the manifest, as an attacker would."""
    data = data.encode("utf-8") if isinstance(data, str) else data
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return claim(folder, name, len(data), hashlib.sha256(data).hexdigest())


def claim(folder: Path, name: str, size: int, sha256: str = "0" * 64) -> Path:
    """List a file in the manifest."""
    manifest = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
    manifest["files"][name] = {"sha256": sha256, "size": size}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest), "utf-8")
    return folder


def sparse(path: Path, size: int) -> None:
    """A file of `size` zero bytes that takes no space."""
    with path.open("wb") as stream:
        stream.truncate(size)


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """header: JSON values or bytes. length: what the file states, if not the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes(found + bytes([number]))


def field(number: int, value: bytes | int) -> bytes:
    """A field of a Protocol Buffers message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def nested_if(levels: int) -> bytes:
    """The graph of a ModelProto, with nested Ifs. Appended to a file, protobuf merges it with the file's own graph."""
    body = field(1, field(1, b"input_ids") + field(2, b"deep") + field(4, b"Identity"))
    for level in range(levels):
        branch = field(5, field(1, b"then_branch") + field(6, body) + field(20, 5))
        body = field(1, field(1, b"input_ids") + field(2, b"out%d" % level) + field(4, b"If") + branch)
    return field(7, body)


def function(name: str, calls: list[str], domain: str = "evil") -> bytes:
    """A ModelProto's function that calls others."""
    nodes = b"".join(
        field(7, field(1, b"x") + field(2, b"y%d" % place) + field(4, called.encode()) + field(7, domain.encode()))
        for place, called in enumerate(calls)
    )
    opset = field(9, field(1, domain.encode()) + field(2, 1))
    return field(
        25, field(1, name.encode()) + field(4, b"x") + field(5, b"y0") + nodes + opset + field(10, domain.encode())
    )


def call(name: str, domain: str = "evil") -> bytes:
    """A ModelProto's graph that calls a function."""
    node = field(1, b"input_ids") + field(2, b"called") + field(4, name.encode()) + field(7, domain.encode())
    return field(7, field(1, node)) + field(8, field(1, domain.encode()) + field(2, 1))

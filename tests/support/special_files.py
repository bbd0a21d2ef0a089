"""Special files in place of regular ones, and an alarm for hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

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

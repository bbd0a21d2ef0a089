"""Open regular files only: opening a named pipe would wait for a writer, and reading a device might never end."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # 0 where the system lacks the flag
_O_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# With O_NONBLOCK, opening a named pipe returns at once, and fstat then shows its type.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_HAS_DIR_FD = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class TooLargeError(OSError):
    """The file has more bytes than the reader allows."""

    def __init__(self, path: str | Path, most: int) -> None:
        super().__init__(errno.EFBIG, f"it has more than {most} bytes", str(path))


class NotRegularError(OSError):
    """The path is not a regular file. kind: what it is, such as `a named pipe` or `a symbolic link`."""

    def __init__(self, kind: str, path: str | Path) -> None:
        known = os.strerror(errno.EISDIR) if kind == "a folder" else f"it is {kind}, not a regular file"
        super().__init__(errno.EINVAL, known, str(path))
        self.kind = kind


def is_file_name(name: object) -> bool:
    """Whether `name` names a file directly in a folder: a text without separators, other than "", "." and ".."."""
    return isinstance(name, str) and name not in ("", ".", "..") and set(name).isdisjoint("/\\\0")


def kind_of(mode: int) -> str:
    """Return the type of a file from its st_mode: `a regular file`, `a folder`, `a named pipe`, ..."""
    if stat.S_ISREG(mode):
        return "a regular file"
    return next((name for holds, name in _KINDS if holds(mode)), "a special file")


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    follow: whether `path` may be a symbolic link to a regular file.
    The type of the opened file is checked too, so that another file cannot take its place after the first check.
    Raises NotRegularError for links (without `follow`), folders, pipes, sockets and devices; OSError like `open`.
    """
    return os.fdopen(_open_checked(path, None, stat.S_ISREG, follow), "rb")


def read_bounded(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Read a whole file. Raises TooLargeError for more than `most` bytes, and the errors of `open_regular`."""
    with open_regular(path, follow=follow) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise TooLargeError(path, most)
    return data


def map_file(path: Path) -> mmap.mmap:
    """Memory-map a regular file read-only. Raises the errors of `open_regular`, and ValueError for an empty file."""
    with open_regular(path) as stream:
        return map_stream(stream)


def map_stream(stream: BinaryIO) -> mmap.mmap:
    """Memory-map an open file read-only.

    The map stays valid when `stream` is closed. Raises ValueError if it is empty.
    """
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file inside `folder` for reading. The folder itself may be a symbolic link.

    name: a plain path with `/` as separator.
    Raises NotRegularError for a symbolic link in `name` and for other files than regular ones; OSError like `open`.
    """
    if not _HAS_DIR_FD:
        _refuse_links(folder, name)
        return open_regular(folder / name)
    *outer, last = name.split("/")
    place = _open_checked(folder, None, stat.S_ISDIR, follow=True)
    try:
        for part in outer:
            inner = _open_checked(part, place, stat.S_ISDIR)
            os.close(place)
            place = inner
        return os.fdopen(_open_checked(last, place, stat.S_ISREG), "rb")
    finally:
        os.close(place)


def special_files(folder: Path, *, deep: bool = False, without: str = "") -> Iterator[tuple[Path, str]]:
    """Yield the pipes, sockets and devices in `folder`, and links to them, each with its type: `a named pipe`, ...

    deep: whether to look into subfolders, except `folder/without` and those that are links.
    """
    waiting, left_out = [folder], folder / without if without else None
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                try:
                    mode = entry.stat().st_mode
                except OSError:  # a broken link
                    continue
                if stat.S_ISDIR(mode):
                    if deep and not entry.is_symlink() and path != left_out:
                        waiting.append(path)
                elif not stat.S_ISREG(mode):
                    yield path, f"a link to {kind_of(mode)}" if entry.is_symlink() else kind_of(mode)


def _open_checked(path: str | Path, place: int | None, wanted: Callable[[int], bool], follow: bool = False) -> int:
    """Open a file of a type, given by a test of st_mode. Returns the descriptor.

    place: the descriptor of the folder that `path` is relative to, or None.
    """
    # Check the type by name first, because opening a device can have effects.
    _require_type(wanted, os.stat(path, dir_fd=place, follow_symlinks=follow).st_mode, path)
    flags = _READ_FLAGS | (0 if follow else _O_NOFOLLOW) | (_O_DIRECTORY if wanted is stat.S_ISDIR else 0)
    handle = os.open(path, flags, dir_fd=place)
    try:
        _require_type(wanted, os.fstat(handle).st_mode, path)
    except OSError:
        os.close(handle)
        raise
    return handle


def _require_type(wanted: Callable[[int], bool], mode: int, path: str | Path) -> None:
    if wanted(mode):
        return
    if wanted is stat.S_ISDIR and not stat.S_ISLNK(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    raise NotRegularError(kind_of(mode), path)


def _refuse_links(folder: Path, name: str) -> None:
    path = folder / name
    try:
        linked = path.resolve() != folder.resolve() / name
    except RuntimeError:  # a link to itself, before Python 3.13
        linked = True
    if linked:
        raise NotRegularError("a symbolic link", path)

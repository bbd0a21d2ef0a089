"""Open and write files safely.

Only regular files are read: opening a named pipe waits for a writer, and a device may never end. Files are written
completely or not at all, with the umask's permissions.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # 0 where unsupported
_O_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# Non-blocking: opening a named pipe returns at once, and fstat shows its type.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | _O_NOFOLLOW
_RELATIVE = os.open in os.supports_dir_fd and os.stat in os.supports_dir_fd
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class TooLargeError(OSError):
    """The file has more bytes than its reader allows."""

    def __init__(self, path: str | Path, most: int) -> None:
        super().__init__(errno.EFBIG, f"it has more than {most} bytes", str(path))


class NotRegularError(OSError):
    """The path is not a regular file. kind: `a named pipe`, `a symbolic link`, ..."""

    def __init__(self, kind: str, path: str | Path) -> None:
        known = os.strerror(errno.EISDIR) if kind == "a folder" else f"it is {kind}, not a regular file"
        super().__init__(errno.EINVAL, known, str(path))
        self.kind = kind


def is_file_name(name: object) -> bool:
    """Whether `name` names a file directly in a folder: a text without separators, other than "", "." and ".."."""
    return isinstance(name, str) and name not in ("", ".", "..") and set(name).isdisjoint("/\\\0")


def kind_of(mode: int) -> str:
    """File type: `a regular file`, `a folder`, `a named pipe`, ..."""
    if stat.S_ISREG(mode):
        return "a regular file"
    return next((name for holds, name in _KINDS if holds(mode)), "a special file")


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. follow: allow a symbolic link.

    The check uses the open descriptor, so that the file cannot be swapped afterwards.
    Raises NotRegularError for links (without `follow`), folders, pipes, sockets and devices; OSError like `open`.
    """
    return os.fdopen(_opened(path, None, stat.S_ISREG, follow), "rb")


def read_bounded(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The whole file. Raises TooLargeError above `most` bytes, and the errors of `open_regular`."""
    with open_regular(path, follow=follow) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise TooLargeError(path, most)
    return data


def mapped(path: Path) -> mmap.mmap:
    """Memory-map a regular file read-only. Raises the errors of `open_regular`, and ValueError for an empty file."""
    with open_regular(path) as stream:
        return map_stream(stream)


def map_stream(stream: BinaryIO) -> mmap.mmap:
    """Memory-map an open file read-only; the map outlives `stream`. Raises ValueError for an empty file."""
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open the regular file `name`, a plain `/`-separated path, inside `folder`, which may be a link.

    Raises NotRegularError for links in `name` and non-regular files; OSError like `open`.
    """
    if not _RELATIVE:
        _refuse_links(folder, name)
        return open_regular(folder / name)
    *outer, last = name.split("/")
    place = _opened(folder, None, stat.S_ISDIR, follow=True)
    try:
        for part in outer:
            inner = _opened(part, place, stat.S_ISDIR)
            os.close(place)
            place = inner
        return os.fdopen(_opened(last, place, stat.S_ISREG), "rb")
    finally:
        os.close(place)


def special_files(folder: Path, *, deep: bool = False, without: str = "") -> Iterator[tuple[Path, str]]:
    """The pipes, sockets and devices in `folder`, and links to them, each with its type: `a named pipe`, ...

    deep: include subfolders except `folder/without`, without following links.
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


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a temporary file that atomically replaces `path`, flushed to disk. On error, `path` is unchanged.

    Permissions follow the umask.
    """
    temporary, handle = _new_file(path)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit(143) in the block, so that its temporary files are removed.

    Only the main thread receives signals: in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def _opened(path: str | Path, place: int | None, wanted: Callable[[int], bool], follow: bool = False) -> int:
    # Check by name first, because opening a device can have effects.
    _require(wanted, os.stat(path, dir_fd=place, follow_symlinks=follow).st_mode, path)
    flags = _READ | (0 if follow else _O_NOFOLLOW) | (_O_DIRECTORY if wanted is stat.S_ISDIR else 0)
    handle = os.open(path, flags, dir_fd=place)
    try:
        _require(wanted, os.fstat(handle).st_mode, path)
    except OSError:
        os.close(handle)
        raise
    return handle


def _require(wanted: Callable[[int], bool], mode: int, path: str | Path) -> None:
    if wanted(mode):
        return
    if wanted is stat.S_ISDIR and not stat.S_ISLNK(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    raise NotRegularError(kind_of(mode), path)


def _refuse_links(folder: Path, name: str) -> None:
    path = folder / name
    try:
        linked = path.resolve() != folder.resolve() / name
    except RuntimeError:  # self-link, before Python 3.13
        linked = True
    if linked:
        raise NotRegularError("a symbolic link", path)


def _new_file(path: Path) -> tuple[Path, int]:
    """Create a temporary file beside `path` whose permissions, unlike tempfile's, follow the umask."""
    while True:
        temporary = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(8)}")
        try:
            return temporary, os.open(temporary, _CREATE, 0o666)
        except FileExistsError:
            continue

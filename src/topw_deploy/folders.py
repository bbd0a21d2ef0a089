"""Read regular files, and write a file or a folder completely or not at all.

Opening a named pipe would wait for a writer, and reading a device might never end. What is written gets its name at the
end; until then it has a hidden name beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from topw_deploy.errors import ExportError
from topw_deploy.text import decimal_size

SPARE = 16 << 20
"""Bytes of the disk that must stay free."""
_AT_FDCWD, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class NotRegularError(OSError):
    """The path is not a regular file. kind: what it is, such as `a named pipe` or `a symbolic link`."""

    def __init__(self, kind: str, path: str | Path) -> None:
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        self.kind = kind


def is_file_name(name: object) -> bool:
    """Whether `name` names a file directly in a folder: a text without separators, other than "", "." and ".."."""
    return isinstance(name, str) and name not in ("", ".", "..") and set(name).isdisjoint("/\\\0")


def kind_of(mode: int) -> str:
    """Return the type of a file from its st_mode: `a regular file`, `a folder`, `a named pipe`, ..."""
    return next((name for holds, name in _KINDS if holds(mode)), "a device")


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    follow: whether `path` may be a symbolic link to a regular file.
    Raises NotRegularError for links (without `follow`), folders, pipes, sockets and devices; OSError like `open`.
    """
    mode = os.stat(path, follow_symlinks=follow).st_mode
    if not stat.S_ISREG(mode):
        raise NotRegularError(kind_of(mode), path)
    return path.open("rb")


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a regular file inside `folder` for reading. The folder itself may be a symbolic link.

    name: a plain path with `/` as separator.
    Raises NotRegularError for a symbolic link in `name`, and the errors of `open_regular`.
    """
    outer = os.path.dirname(name)
    if os.path.realpath(folder / outer) != os.path.join(os.path.realpath(folder), outer).rstrip(os.sep):
        raise NotRegularError("a symbolic link", folder / name)
    return open_regular(folder / name)


def read_bounded(path: Path, most: int, *, follow: bool = False) -> bytes:
    """Read a whole file. Raises OSError for more than `most` bytes, and the errors of `open_regular`."""
    with open_regular(path, follow=follow) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
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


@contextmanager
def atomic_folder(
    output: Path,
    *,
    marker: str,
    kind: str,
    overwrite: bool = False,
    keep_failed: bool = False,
    place: Path | None = None,
) -> Iterator[Path]:
    """Yield an empty folder that becomes `output` at the end of the block. An error or SIGTERM changes nothing.

    `output` is locked meanwhile, so that a second process that writes it fails at once.

    marker, kind: the file that `overwrite` requires in a folder with contents, and what such a folder is.
    overwrite: whether to replace an earlier folder of this kind.
    keep_failed: whether to keep the files after an error, as `OUTPUT.failed`, which replaces earlier ones.
    place: the folder for the hidden folder, on the device of `output`; by default the parent of `output`.
    Raises ExportError if `output` is not free, is locked or cannot be written.
    """
    output = Path(os.path.abspath(output))
    check_free(output, marker=marker, kind=kind, overwrite=overwrite)
    place = place or output.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place / f".{output.name}.topw-lock", output), sigterm_raises():
            prefix = f".{output.name}.topw-partial-"
            for left in [path for path in place.iterdir() if path.name.startswith(prefix)]:  # of a killed process
                shutil.rmtree(left, ignore_errors=True)
            workspace = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            made = workspace / output.name
            try:
                made.mkdir()
                yield made
                check_free(output, marker=marker, kind=kind, overwrite=overwrite)
                _put_in_place(made, output)
            except Exception:
                if keep_failed:
                    failed = output.with_name(f"{output.name}.failed")
                    shutil.rmtree(failed, ignore_errors=True)
                    shutil.move(made, failed)
                raise
            finally:
                shutil.rmtree(workspace, ignore_errors=True)
    except OSError as error:
        raise _write_error(output, error) from error


def check_free(output: Path, *, marker: str, kind: str, overwrite: bool) -> None:
    """Raise ExportError unless `output` is new, empty, or (`overwrite`) a folder with the file `marker`."""
    try:
        if not output.exists() and not output.is_symlink():
            above = next(parent for parent in Path(os.path.abspath(output)).parents if parent.exists())
            if not above.is_dir():
                raise ExportError(f"{output} cannot be created, because {above} is not a folder; choose another one.")
            if not os.access(above, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        if output.is_symlink() or not output.is_dir():
            raise ExportError(f"{output} is not a folder; choose another one.")
        if output.resolve() == Path.cwd():
            raise ExportError(f"{output} is the current folder, which cannot be replaced; choose a folder in it.")
        if not any(output.iterdir()):
            return
    except OSError as error:
        raise _write_error(output, error) from error
    if not overwrite:
        raise ExportError(f"{output} is not empty; choose another folder or give --overwrite.")
    if not (output / marker).is_file():
        raise ExportError(
            f"{output} holds files that are not {kind} (no {marker}), which --overwrite does not delete; choose "
            "another folder or empty it."
        )


def require_space(folder: Path, needed: int) -> None:
    """Raise ExportError if the disk of `folder` has fewer than `needed` + SPARE free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        more = decimal_size(needed + SPARE - free)
        raise ExportError(
            f"the disk of {folder} has {decimal_size(free)} free, but needs {more} more; make room or choose another "
            "output."
        )


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream for the new content of `path`. The content replaces the file at the end of the block, in one step.

    It is flushed to disk before. After an error, `path` is unchanged. Permissions follow the umask.
    """
    temporary = path.with_name(f".{path.stem[:40]}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside the block, SIGTERM raises SystemExit(143), so that temporary files are removed.

    Only the main thread receives signals. In other threads, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _locked(file: Path, output: Path) -> Iterator[None]:
    """Hold a lock on `file`, which is removed at the end. Raise ExportError if another process holds it.

    The system releases the lock of a killed process. Windows, and file systems without locks, have none.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    with os.fdopen(handle, "r+") as stream:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = os.path.samestat(os.fstat(handle), file.stat())  # no holder has removed it meanwhile
            except (BlockingIOError, FileNotFoundError):
                is_free = False
            except OSError:  # the file system has no locks
                is_free = True
            if not is_free:
                raise ExportError(
                    f"{output} is being written by another process ({stream.read(200) or 'which has just started'}); "
                    "wait until it ends, or choose another output."
                )
        try:
            stream.truncate(0)
            stream.write(f"process {os.getpid()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
            stream.flush()
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows removes no open file
                file.unlink()


def _put_in_place(made: Path, output: Path) -> None:
    """Flush the folder `made` to disk and rename it to `output`, which it replaces.

    If the system can exchange two folders in one step, the old folder is then at `made`, and the caller removes it.
    Otherwise the old folder is moved away and removed. A process that is killed between these steps leaves both folders
    under hidden names.
    """
    for path in [*sorted(file for file in made.rglob("*") if file.is_file()), made]:
        _sync(path)
    if not output.exists():
        made.rename(output)
    elif not _exchange(made, output):
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.topw-old-", dir=output.parent)) / output.name
        try:
            output.rename(old)
            made.rename(output)
        except BaseException:  # also Ctrl-C right after a rename
            if old.exists() and not output.exists():
                old.rename(output)
            raise
        finally:
            shutil.rmtree(old.parent, ignore_errors=True)
    _sync(output.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step. Returns whether it could: the common file systems of Linux can."""
    if sys.platform != "linux":
        return False
    try:
        renameat2: Any = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # glibc before 2.28
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(output: Path, error: OSError) -> ExportError:
    """Return the user's error for an OSError while writing `output`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ExportError(f"the disk is full while writing {output}; nothing was kept, make room and write it again.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ExportError(f"{output} cannot be written ({error.strerror}); choose a folder you may write to.")
    return ExportError(f"writing {output} failed ({error.strerror or error}); nothing was kept, write it again.")

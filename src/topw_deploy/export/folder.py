"""Writing a folder so that it is there whole or not at all.

Everything is written into a hidden sibling of OUT and renamed at the very end. Whatever happens before (an error, an
interrupt, a kill), OUT is what it was.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from topw_deploy.errors import ExportError
from topw_deploy.manifest import MANIFEST_NAME

Progress = Callable[[int], object]

_SPARE = 16 << 20  # bytes left free beside what is written
_PARTIAL = ".topw-partial-"  # in the names of folders that are being written
_COPY_PART = 64 << 20
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}  # another device, or a file system without links


class StagedFolder:
    """A context manager: write into `.path`, then call `commit()`; leaving without it removes what was written.

    output: the folder to make. overwrite: replace an earlier export there, at the end. keep_failed: rename what was
    written to `OUT.failed` instead of removing it.
    Raises ExportError on entering if OUT is not free or cannot be written.
    """

    def __init__(self, output: Path, *, overwrite: bool = False, keep_failed: bool = False) -> None:
        self.output = Path(os.path.abspath(output))
        self.kept: Path | None = None
        self._overwrite, self._keep_failed = overwrite, keep_failed
        self._committed = False
        self._old_handler: Any = None

    def __enter__(self) -> Self:
        check_free(self.output, self._overwrite)
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            # beside OUT; inside it where a rename could not get there from beside
            place = self.output if os.path.ismount(self.output) else self.output.parent
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.output.name}{_PARTIAL}", dir=place))
            self.path.chmod(0o755)
        except OSError as error:
            raise write_error(self.output, error) from error
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _terminate)
        return self

    def commit(self) -> None:
        """Flush everything to disk and put the folder in OUT's place in one rename; an empty folder that is there
        already stays (somebody may stand in it, or have mounted it) and is filled, the manifest last."""
        check_free(self.output, self._overwrite)  # again: somebody else may have been faster
        try:
            for file in sorted(self.path.rglob("*")):
                if file.is_file():
                    _sync(file)
            _sync(self.path)
            _replace(self.path, self.output)
            _sync(self.output.parent)
        except OSError as error:
            raise write_error(self.output, error) from error
        self._committed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
        if self._committed:
            return
        if self._keep_failed and isinstance(error, Exception):
            self.kept = _free_name(self.output)
            shutil.move(self.path, self.kept)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise write_error(self.output, error) from error


def check_free(output: Path, overwrite: bool) -> None:
    """Raises ExportError unless `output` can be made, is empty, or (with `overwrite`) is an earlier export."""
    try:
        taken = _is_taken(output)
    except OSError as error:
        raise write_error(output, error) from error
    if not taken:
        return
    if not overwrite:
        raise ExportError(f"{output} is not empty; choose another output or give --overwrite.")
    if not (output / MANIFEST_NAME).is_file():
        raise ExportError(
            f"{output} holds files that are not an export of this tool (no {MANIFEST_NAME}), which --overwrite does "
            "not delete; choose another output or empty it."
        )
    if os.path.ismount(output) or output.resolve() == Path.cwd():
        what = "a mount point" if os.path.ismount(output) else "the current folder"
        raise ExportError(
            f"{output} is {what}, which cannot be replaced in one step; empty it, or choose another output."
        )


def _is_taken(output: Path) -> bool:
    """Whether `output` holds something; ExportError if it is no folder, or lies where none can be made."""
    if not output.exists() and not output.is_symlink():
        above = next(parent for parent in Path(os.path.abspath(output)).parents if parent.exists())
        if not above.is_dir():
            raise ExportError(f"{output} cannot be made, because {above} is not a folder; choose another output.")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return False
    if not output.is_dir() or output.is_symlink():
        raise ExportError(f"{output} is not a folder; choose another output.")
    return any(_PARTIAL not in entry.name for entry in output.iterdir())


def require_space(folder: Path, needed: int) -> None:
    """Raises ExportError if the disk of `folder` has fewer than `needed` bytes (and a little) free."""
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE:
        raise ExportError(
            f"the disk of {folder} has {free / 1e9:.2f} GB free, but the export needs "
            f"{(needed + _SPARE) / 1e9:.2f} GB; make room or choose another output."
        )


def bring(source: Path, target: Path, *, hard_link: bool = False, progress: Progress = lambda _bytes: None) -> None:
    """Put `source`'s content at `target`; a symbolic link in the source (the hub's cache) is followed first.

    A copy, which shares its blocks with the source on file systems that can. With `hard_link` both names mean one
    file, where the file system allows it: no time and no space, but onnx and onnx_ir then refuse to read either folder,
    taking the second name for an attack (onnxruntime does not). Never a symbolic link: onnxruntime refuses those.
    progress: called with the number of bytes of each part that is done.
    """
    real = source.resolve(strict=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if hard_link:
        try:
            os.link(real, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            progress(real.stat().st_size)
            return
    with real.open("rb") as read, target.open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        done = _copy_in_kernel(read.fileno(), write.fileno(), size, progress)
        read.seek(done)
        write.seek(done)
        while part := read.read(_COPY_PART):
            write.write(part)
            progress(len(part))


def _copy_in_kernel(read: int, write: int, size: int, progress: Progress) -> int:
    """Copy with copy_file_range, which clones where it can; returns how many bytes it managed."""
    done = 0
    while hasattr(os, "copy_file_range") and done < size:
        try:
            copied = os.copy_file_range(read, write, min(_COPY_PART, size - done), done, done)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            break
        if copied == 0:
            break
        done += copied
        progress(copied)
    return done


def linkable(source: Path, folder: Path) -> bool:
    """Whether a hard link from `folder` to `source` would need no space: both on one device."""
    return source.resolve().stat().st_dev == folder.stat().st_dev


def write_error(output: Path, error: OSError) -> ExportError:
    """The user's words for an operating system error while writing `output`."""
    if error.errno == errno.ENOSPC:
        return ExportError(f"the disk is full while writing {output}; nothing was kept, make room and export again.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ExportError(f"{output} cannot be written ({error.strerror}); choose a folder you may write to.")
    return ExportError(f"writing {output} failed ({error.strerror or error}); nothing was kept, export again.")


def _replace(staged: Path, output: Path) -> None:
    """Rename `staged` to `output`; an earlier export there steps aside first, and comes back if that fails."""
    if not output.exists():
        staged.rename(output)
        return
    if not _is_taken(output):
        _fill(output, staged)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}.topw-old-", dir=output.parent))
    try:
        output.rename(aside / output.name)
        try:
            staged.rename(output)
        except BaseException:
            (aside / output.name).rename(output)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(output: Path, staged: Path) -> None:
    """Move what `staged` holds into the empty folder `output`, the manifest last; all of it or nothing."""
    entries = sorted(staged.iterdir(), key=lambda path: path.name == MANIFEST_NAME)
    try:
        for entry in entries:
            entry.rename(output / entry.name)
    except BaseException:
        for entry in reversed(entries):
            if (output / entry.name).exists():
                (output / entry.name).rename(entry)  # leaving the context removes it there
        raise
    staged.rmdir()


def _free_name(output: Path) -> Path:
    number = 1
    while (name := output.with_name(f"{output.name}.failed" + (f"-{number}" if number > 1 else ""))).exists():
        number += 1
    return name


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that everything on the way out cleans up."""
    raise SystemExit(143)

"""Write a folder completely or not at all.

An export writes its files into a hidden, locked folder beside OUT, and renames it to OUT at the end. A hidden folder
that is not locked belongs to a process that has ended. The next export to OUT resumes it or removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from topw_deploy.errors import ExportError
from topw_deploy.export.write.fill import PARTIAL, fill, is_being_filled, undo_fill
from topw_deploy.files import sigterm_raises
from topw_deploy.folders import refuse_contents, replace_folder, write_error
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.progress import Advance
from topw_deploy.text import decimal_size

_locks: Any
try:
    import fcntl as _locks
except ImportError:  # Windows has no flock: the files of a killed export stay there
    _locks = None


SPARE = 16 << 20
"""Bytes of the disk that must stay free."""
_LOCK = "lock"
_ABANDONED_AFTER = 3600  # seconds after which a folder without a lock file counts as abandoned
_COPY_PART = 64 << 20  # bytes
_NO_LINKS = {
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.ENOTSUP,
}  # other device, or no hard links
_INTERRUPTIONS = (KeyboardInterrupt, SystemExit, OSError, MemoryError, ExportError)


class StagedFolder:
    """A context manager for a folder that appears as `output` with `commit()`. Without it, the files are removed.

    overwrite: replace an earlier export.
    keep_failed: after an error, keep the files as `OUT.failed`.
    resume: continue an interrupted export; keep its files if it is interrupted again.
    path: the folder to write into.
    workspace: the hidden folder that contains `path`.
    kept: where the files are after an error, with `keep_failed`; otherwise None.
    Raises ExportError on entry if `output` is not free or cannot be written.
    """

    def __init__(
        self, output: Path, *, overwrite: bool = False, keep_failed: bool = False, resume: bool = False
    ) -> None:
        self.output = Path(os.path.abspath(output))
        self.kept: Path | None = None
        self._overwrite, self._keep_failed, self._resume = overwrite, keep_failed, resume
        self._committed = False
        self._lock: int | None = None
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        check_free(self.output, self._overwrite)
        try:
            undo_fill(self.output)
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.workspace = self._resume_workspace() or self._create_workspace()
            self.path = self.workspace / self.output.name
            if self.path.exists():
                _permit_as_new(self.path)
            else:
                self.path.mkdir()
        except OSError as error:
            _unlock(self._lock)  # so that the next export removes or resumes the hidden folder
            raise _write_error(self.output, error) from error
        self._signals.enter_context(sigterm_raises())
        return self

    def _create_workspace(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix=f".{self.output.name}{PARTIAL}", dir=_workspace_parent(self.output)))
        self._lock = _lock(made)
        return made

    def _resume_workspace(self) -> Path | None:
        """With `resume`, lock and return the newest abandoned folder. Remove the others."""
        found: Path | None = None
        for workspace, lock in _abandoned_workspaces(self.output):
            if self._resume and found is None:
                found, self._lock = workspace, lock
            else:
                _remove(workspace)
                _unlock(lock)
        return found

    def commit(self) -> None:
        """Flush all files to disk and rename the folder to OUT.

        An empty folder OUT is filled instead, because it may be a working directory or a mount point.
        Raises ExportError if OUT is no longer free, or on a failed write.
        """
        check_free(self.output, self._overwrite)  # another process may have written OUT meanwhile
        try:
            for file in sorted(self.path.rglob("*")):
                if file.is_file():
                    _sync(file)
            _sync(self.path)
            _put_in_place(self.path, self.output)
            _sync(self.output.parent)
        except OSError as error:
            raise _write_error(self.output, error) from error
        self._committed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        stays = self._resume and not self._committed and isinstance(error, _INTERRUPTIONS)
        if not stays:
            if self._keep_failed and not self._committed and isinstance(error, Exception):
                self.kept = _unused_failed_name(self.output)
                shutil.move(self.path, self.kept)
            _remove(self.workspace)
        _unlock(self._lock)
        if isinstance(error, OSError):
            raise _write_error(self.output, error, kept=stays) from error


def _workspace_parent(output: Path) -> Path:
    """Return the folder that holds hidden folders: the parent of `output`, or `output` itself if it is a mount point.

    A folder cannot be renamed from one device to another.
    """
    return output if os.path.ismount(output) else output.parent


def _abandoned_workspaces(output: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield the hidden folders of ended processes, newest first, each with the lock that the caller must release."""
    prefix = f".{output.name}{PARTIAL}"
    changed: dict[Path, float] = {}
    for path in _workspace_parent(output).iterdir():
        with contextlib.suppress(FileNotFoundError):  # another export has just ended
            if path.name.startswith(prefix) and _is_own_folder(path):
                changed[path] = path.stat().st_mtime
    for path in sorted(changed, key=lambda path: changed[path], reverse=True):
        if _locks is None:
            return
        if not (path / _LOCK).exists():
            if time.time() - changed[path] > _ABANDONED_AFTER:
                yield path, None
            continue
        try:
            lock = _lock(path)
        except (BlockingIOError, FileNotFoundError):  # in use, or just removed
            continue
        yield path, lock


def _remove(workspace: Path) -> None:
    """Remove a hidden folder, its lock file last.

    If this is interrupted, the next export finds the lock and continues.
    """
    for path in workspace.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(workspace, ignore_errors=True)


def _is_own_folder(path: Path) -> bool:
    """Whether `path` is a folder of this user. In a parent like /tmp, others could plant folders and links."""
    about = path.lstat()
    return stat.S_ISDIR(about.st_mode) and (not hasattr(os, "geteuid") or about.st_uid == os.geteuid())


def _lock(workspace: Path) -> int | None:
    """Lock a hidden folder until `_unlock`, or the end of this process. Raises BlockingIOError if it is in use."""
    if _locks is None:
        return None
    handle = os.open(workspace / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _locks.flock(handle, _locks.LOCK_EX | _locks.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _permit_as_new(folder: Path) -> None:
    """Give a resumed folder the permissions of a new one. Hard-linked files keep theirs."""
    sample = folder.with_name(f".{folder.name}.topw-mode")
    shutil.rmtree(sample, ignore_errors=True)  # of a process killed in this function
    sample.mkdir()
    try:
        (sample / "file").touch()
        folder_mode, file_mode = (stat.S_IMODE(path.stat().st_mode) for path in (sample, sample / "file"))
    finally:
        shutil.rmtree(sample)
    folder.chmod(folder_mode)
    for path in folder.rglob("*"):
        about = path.lstat()
        if stat.S_ISDIR(about.st_mode):
            path.chmod(folder_mode)
        elif stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            path.chmod(file_mode)


def _unlock(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def check_free(output: Path, overwrite: bool) -> None:
    """Raises ExportError unless `output` is new, empty, or (`overwrite`) an earlier export."""
    try:
        taken = _is_taken(output)
    except OSError as error:
        raise _write_error(output, error) from error
    if not taken:
        return
    kind = "an export of topw_deploy"
    refuse_contents(output, overwrite=overwrite, marker=MANIFEST_NAME, kind=kind, name="output")
    if os.path.ismount(output) or output.resolve() == Path.cwd():
        what = "a mount point" if os.path.ismount(output) else "the current folder"
        raise ExportError(
            f"{output} is {what}, which cannot be replaced in one step; empty it, or choose another output."
        )


def _is_taken(output: Path) -> bool:
    """Raises ExportError if `output` cannot be a folder."""
    if not output.exists() and not output.is_symlink():
        above = next(parent for parent in Path(os.path.abspath(output)).parents if parent.exists())
        if not above.is_dir():
            raise ExportError(f"{output} cannot be created, because {above} is not a folder; choose another output.")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return False
    if not output.is_dir() or output.is_symlink():
        raise ExportError(f"{output} is not a folder; choose another output.")
    return not is_being_filled(output) and any(PARTIAL not in entry.name for entry in output.iterdir())


def require_space(folder: Path, needed: int) -> None:
    """Raises ExportError if the disk of `folder` has fewer than `needed` + SPARE free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        raise ExportError(
            f"the disk of {folder} has {decimal_size(free, 2)} free, but the export needs "
            f"{decimal_size(needed + SPARE, 2)}; make room or choose another output."
        )


def copy_file(source: Path, target: Path, *, hard_link: bool = False, progress: Advance = lambda _bytes: None) -> None:
    """Copy a file, following symbolic links. Where the file system can clone files, this takes no space.

    hard_link: make a hard link where the file system can. That takes no time or space, but onnx and onnx_ir refuse
        hard-linked data files as an attack. onnxruntime accepts them, but not symbolic links.
    progress: called with the number of bytes of each part.
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


def _copy_in_kernel(read: int, write: int, size: int, progress: Advance) -> int:
    """Copy as many bytes as the kernel can copy between these files. Returns their number."""
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


def can_hard_link(source: Path, folder: Path) -> bool:
    """Whether `source` is on the device of `folder`, as hard links must be."""
    return source.resolve().stat().st_dev == folder.stat().st_dev


def _write_error(output: Path, error: OSError, *, kept: bool = False) -> ExportError:
    return write_error(output, error, "export again with --resume" if kept else "export again", kept=kept)


def _put_in_place(staged: Path, output: Path) -> None:
    if not output.exists():
        staged.rename(output)
    elif _is_taken(output):
        replace_folder(staged, output)
    else:
        fill(output, staged)


def _unused_failed_name(output: Path) -> Path:
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

"""Write a folder completely or not at all.

Files are written into a hidden, locked folder beside OUT, which is renamed at the end. An unlocked one belongs to a
process that has ended; the next export to OUT removes or resumes it.
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
from topw_deploy.sizes import decimal_size

_locks: Any
try:
    import fcntl as _locks
except ImportError:  # Windows: the files of a killed export remain
    _locks = None


SPARE = 16 << 20
"""Bytes that must stay free."""
_LOCK = "lock"
_UNLOCKED_FOR = 3600  # seconds after which a folder without a lock file counts as abandoned
_COPY_PART = 64 << 20
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP}  # another device, or no hard links
_INTERRUPTIONS = (KeyboardInterrupt, SystemExit, OSError, MemoryError, ExportError)


class StagedFolder:
    """Context manager: write into `path`, then `commit()`; otherwise the files are removed.

    overwrite: replace an earlier export.
    keep_failed: keep failed files as `OUT.failed`.
    resume: continue an interrupted export; if interrupted again, keep the files.
    workspace: the hidden folder that contains `path`.
    Raises ExportError on entry if `output` is not free or writable.
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
            self.workspace = self._resumed() or self._made()
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

    def _made(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix=f".{self.output.name}{PARTIAL}", dir=_place(self.output)))
        self._lock = _lock(made)
        return made

    def _resumed(self) -> Path | None:
        """The newest abandoned folder; removes others."""
        found: Path | None = None
        for workspace, lock in _left_behind(self.output):
            if self._resume and found is None:
                found, self._lock = workspace, lock
            else:
                _remove(workspace)
                _unlock(lock)
        return found

    def commit(self) -> None:
        """Flush all files to disk and rename the folder to OUT.

        If OUT is an empty folder, fills it instead, manifest last: it may be a working directory or mount point.
        """
        check_free(self.output, self._overwrite)  # another process may have written it
        try:
            for file in sorted(self.path.rglob("*")):
                if file.is_file():
                    _sync(file)
            _sync(self.path)
            _put(self.path, self.output)
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
                self.kept = _free_name(self.output)
                shutil.move(self.path, self.kept)
            _remove(self.workspace)
        _unlock(self._lock)
        if isinstance(error, OSError):
            raise _write_error(self.output, error, kept=stays) from error


def _place(output: Path) -> Path:
    """The folder for hidden folders: the parent, or `output` itself if it is a mount point, so that renaming works."""
    return output if os.path.ismount(output) else output.parent


def _left_behind(output: Path) -> Iterator[tuple[Path, int | None]]:
    """Hidden folders of ended processes, newest first, locked for the caller."""
    prefix = f".{output.name}{PARTIAL}"
    changed: dict[Path, float] = {}
    for path in _place(output).iterdir():
        with contextlib.suppress(FileNotFoundError):  # another export has just ended
            if path.name.startswith(prefix) and _is_own_folder(path):
                changed[path] = path.stat().st_mtime
    for path in sorted(changed, key=lambda path: changed[path], reverse=True):
        if _locks is None:
            return
        if not (path / _LOCK).exists():
            if time.time() - changed[path] > _UNLOCKED_FOR:
                yield path, None
            continue
        try:
            lock = _lock(path)
        except (BlockingIOError, FileNotFoundError):  # in use, or just removed
            continue
        yield path, lock


def _remove(workspace: Path) -> None:
    """The lock file last: if this is interrupted, the next export finds it, and removes the rest at once."""
    for path in workspace.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(workspace, ignore_errors=True)


def _is_own_folder(path: Path) -> bool:
    """Whether this user made it: others may write into the parent, as in /tmp, and plant folders and links."""
    about = path.lstat()
    return stat.S_ISDIR(about.st_mode) and (not hasattr(os, "geteuid") or about.st_uid == os.geteuid())


def _lock(workspace: Path) -> int | None:
    """Lock until this process ends. Raises BlockingIOError if in use."""
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
    """Apply the current umask. Hard-linked files keep their permissions."""
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
    """Raises ExportError without `needed` + SPARE free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        raise ExportError(
            f"the disk of {folder} has {decimal_size(free, 2)} free, but the export needs "
            f"{decimal_size(needed + SPARE, 2)}; make room or choose another output."
        )


def copy_file(source: Path, target: Path, *, hard_link: bool = False, progress: Advance = lambda _bytes: None) -> None:
    """Copy `source`, following symbolic links. The file system clones it where it can.

    hard_link: hard-link where supported. That takes no time or space, but onnx and onnx_ir refuse such data files as an
    attack. onnxruntime accepts them, but not symbolic links.
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
    """Returns bytes copied."""
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
    return source.resolve().stat().st_dev == folder.stat().st_dev


def _write_error(output: Path, error: OSError, *, kept: bool = False) -> ExportError:
    return write_error(output, error, "export again with --resume" if kept else "export again", kept=kept)


def _put(staged: Path, output: Path) -> None:
    if not output.exists():
        staged.rename(output)
    elif _is_taken(output):
        replace_folder(staged, output)
    else:
        fill(output, staged)


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

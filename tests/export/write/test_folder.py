"""A folder is complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG
from topw_deploy import folders
from topw_deploy.errors import ExportError
from topw_deploy.export.write import staging as folder_module
from topw_deploy.export.write.staging import StagedFolder, check_free, copy_file, require_space
from topw_deploy.manifest import MANIFEST_NAME


def write_and_raise(staged: StagedFolder, error: BaseException) -> None:
    with staged:
        (staged.path / "file").write_text("x")
        raise error


def leftovers(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith("."))


def test_commit_puts_the_folder_in_place_and_leaves_nothing_else(tmp_path: Path) -> None:
    with StagedFolder(tmp_path / "a" / "out") as staged:
        (staged.path / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
        staged.commit()
    assert (tmp_path / "a" / "out" / "file").read_text() == "x"
    assert leftovers(tmp_path / "a") == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_raise(StagedFolder(tmp_path / "out"), error())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_folder_is_kept_under_another_name_on_request(tmp_path: Path) -> None:
    for name in ("out.failed", "out.failed-2"):
        staged = StagedFolder(tmp_path / "out", keep_failed=True)
        with pytest.raises(ValueError, match="wrong"):
            write_and_raise(staged, ValueError("wrong"))
        assert staged.kept == tmp_path / name
        assert (tmp_path / name / "file").exists()
    assert not (tmp_path / "out").exists()


def test_an_earlier_export_is_replaced_only_at_the_very_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST_NAME).write_text("old")
    with pytest.raises(ValueError, match="stop"), StagedFolder(out, overwrite=True) as staged:
        raise ValueError("stop")
    assert (out / MANIFEST_NAME).read_text() == "old"
    with StagedFolder(out, overwrite=True) as staged:
        (staged.path / MANIFEST_NAME).write_text("new")
        assert (out / MANIFEST_NAME).read_text() == "old"
        staged.commit()
    assert (out / MANIFEST_NAME).read_text() == "new"
    assert leftovers(tmp_path) == []


def test_a_failed_rename_restores_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST_NAME).write_text("old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".topw-partial-" in str(self.parent):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(folders, "exchange", lambda *_: False)  # as on other systems than Linux
    with pytest.raises(ExportError, match="Input/output error"), StagedFolder(out, overwrite=True) as staged:
        staged.commit()
    assert (out / MANIFEST_NAME).read_text() == "old"


@pytest.mark.parametrize(("number", "found"), [(1, "old"), (2, "new")])
def test_ctrl_c_right_after_a_rename_leaves_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, found: str
) -> None:
    """On systems without an exchange of folders in one step."""
    out, rename, renamed = tmp_path / "out", Path.rename, list[Path]()
    out.mkdir()
    (out / MANIFEST_NAME).write_text("old")

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        renamed.append(self)
        if len(renamed) == number:
            raise KeyboardInterrupt
        return moved

    def write() -> None:
        with StagedFolder(out, overwrite=True) as staged:
            (staged.path / MANIFEST_NAME).write_text("new")
            staged.commit()

    monkeypatch.setattr(Path, "rename", interrupted)
    monkeypatch.setattr(folders, "exchange", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert (out / MANIFEST_NAME).read_text() == found
    assert leftovers(tmp_path) == []


def test_ctrl_c_while_files_are_removed_leaves_them_to_the_next_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        (path / "lock").unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), StagedFolder(tmp_path / "out") as staged:
        patch.setattr(shutil, "rmtree", interrupted)
    assert len(leftovers(tmp_path)) == 1
    os.close(staged._lock or 0)  # as at the end of the process
    with StagedFolder(tmp_path / "out") as staged:
        assert leftovers(tmp_path) == [staged.workspace.name]
    assert leftovers(tmp_path) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match=r"is not empty.*--overwrite"):
        check_free(tmp_path, overwrite=False)
    with pytest.raises(ExportError, match="not an export of topw_deploy"):
        check_free(tmp_path, overwrite=True)
    with pytest.raises(ExportError, match="not a folder"):
        check_free(tmp_path / "file", overwrite=True)


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    with StagedFolder(tmp_path / "out") as staged:
        (tmp_path / "out").mkdir()
        (staged.path / "file").write_text("x")
        staged.commit()
    assert (tmp_path / "out" / "file").exists()


def test_a_read_only_parent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_arguments: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folder_module.tempfile, "mkdtemp", refuse)
    with pytest.raises(ExportError, match=r"cannot be written.*Permission denied"), StagedFolder(tmp_path / "out"):
        pass


def test_a_folder_that_could_not_be_made_is_removed_by_the_next_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def full(self: Path, *arguments: object, **options: object) -> None:
        if self.name == "out":
            raise OSError(errno.ENOSPC, "No space left on device")
        make(self, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(ExportError, match="disk is full"), StagedFolder(tmp_path / "out"):
            pass
    with StagedFolder(tmp_path / "out") as staged:
        assert leftovers(tmp_path) == [staged.workspace.name]


@pytest.mark.parametrize("step", ["_is_own_folder", "_lock"])
def test_the_folder_of_an_export_that_ends_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ending = tmp_path / ".out.topw-partial-ending"
    ending.mkdir()
    (ending / "lock").touch()
    real = getattr(folder_module, step)

    def end_first(path: Path) -> object:
        if path == ending:
            shutil.rmtree(ending)
        return real(path)

    monkeypatch.setattr(folder_module, step, end_first)
    with StagedFolder(tmp_path / "out") as staged:
        assert leftovers(tmp_path) == [staged.workspace.name]


def test_too_little_space_is_reported_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 5, 1_000_000))
    with pytest.raises(ExportError, match=r"1\.00 MB free, but the export needs 3\.02 GB"):
        require_space(tmp_path, 3_000_000_000)


def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="disk is full"), StagedFolder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kernel", [True, False])
def test_data_files_are_copied_whole_and_links_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    (tmp_path / "blob").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    parts: list[int] = []
    copy_file(tmp_path / "link", tmp_path / "sub" / "copy", progress=parts.append)
    copy = tmp_path / "sub" / "copy"
    assert copy.read_bytes() == (tmp_path / "blob").read_bytes()
    assert not copy.is_symlink()
    assert copy.stat().st_nlink == 1
    assert sum(parts) == 256_000


def test_a_hard_link_falls_back_to_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    copy_file(tmp_path / "blob", tmp_path / "linked", hard_link=True)
    assert (tmp_path / "linked").stat().st_ino == (tmp_path / "blob").stat().st_ino

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copy_file(tmp_path / "blob", tmp_path / "copied", hard_link=True)
    assert (tmp_path / "copied").read_bytes() == b"weights"


WAITING = """
import sys, time
from pathlib import Path
place, model = map(Path, sys.argv[1:])
def wait(folder):
    (folder / "file").write_text("x")
    print("ready", flush=True)
    time.sleep(600)
"""
EXPORT = """
from topw_deploy.export.write.staging import StagedFolder
with StagedFolder(place / "out") as staged:
    wait(staged.path)
"""
SITE = """
from topw_deploy.web.staging import staged_site
with staged_site(place / "out", overwrite=False) as folder:
    wait(folder)
"""
REPOSITORY = """
from topw_deploy.triton import repository
repository._write_files = lambda work, *_: wait(work)
repository.write_repository(model, place, name="out")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [EXPORT, SITE, REPOSITORY], ids=["export", "site", "repository"])
def test_a_terminated_process_cleans_up(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, code: str, number: int
) -> None:
    model = export(tmp_path_factory.mktemp("model") / "out", Toy.random(1))
    command = [sys.executable, "-c", WAITING + code, str(tmp_path), str(model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.wait(HANG) != 0
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_empty_folder_is_filled_in_place(tmp_path: Path) -> None:
    """A rename cannot replace a working directory or mount point."""
    out = tmp_path / "out"
    out.mkdir()
    before = out.stat().st_ino
    with StagedFolder(out) as staged:
        (staged.path / MANIFEST_NAME).write_text("new")
        (staged.path / "sub").mkdir()
        (staged.path / "sub" / "file").write_text("x")
        staged.commit()
    assert out.stat().st_ino == before
    assert (out / "sub" / "file").read_text() == "x"
    assert leftovers(tmp_path) == leftovers(out) == []


def test_filling_an_empty_folder_moves_the_manifest_last_and_undoes_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    rename, there = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        if self.name == MANIFEST_NAME:
            there.extend(path.name for path in out.iterdir())
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with StagedFolder(out) as staged:
        for name in ("a", MANIFEST_NAME, "z"):
            (staged.path / name).write_text("x")
        with pytest.raises(ExportError, match="Input/output error"):
            staged.commit()
    assert sorted(there) == [".topw-partial-moved", "a", "z"]
    assert list(tmp_path.rglob("*")) == [out]


def test_a_mount_point_is_written_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    with StagedFolder(out) as staged:
        assert staged.path.parent.parent == out
        (staged.path / MANIFEST_NAME).write_text("x")
        staged.commit()
    assert [path.name for path in out.iterdir()] == [MANIFEST_NAME]
    with pytest.raises(ExportError, match="is a mount point"):
        check_free(out, overwrite=True)


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MANIFEST_NAME).write_text("old")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="is the current folder"):
        check_free(Path("."), overwrite=True)


def test_of_two_exports_at_once_the_first_to_finish_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fast, slow = StagedFolder(out), StagedFolder(out)
    with fast, slow:
        (fast.path / MANIFEST_NAME).write_text("fast")
        fast.commit()
        with pytest.raises(ExportError, match="is not empty"):
            slow.commit()
    assert (out / MANIFEST_NAME).read_text() == "fast"
    assert leftovers(tmp_path) == []


def test_an_immovable_folder_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / MANIFEST_NAME).write_text("old")

    def busy(_self: Path, _target: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)
    monkeypatch.setattr(folders, "exchange", lambda *_: False)
    with pytest.raises(ExportError, match="busy"), StagedFolder(out, overwrite=True) as staged:
        staged.commit()
    assert (out / MANIFEST_NAME).read_text() == "old"
    assert leftovers(tmp_path) == []


def test_an_impossible_output_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match=r"file is not a folder"):
        check_free(tmp_path / "file" / "a" / "out", overwrite=False)
    with pytest.raises(ExportError, match="name too long"):
        check_free(tmp_path / ("a" * 300), overwrite=False)
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    with pytest.raises(ExportError, match=r"cannot be written.*Permission denied"):
        check_free(tmp_path / "out", overwrite=False)

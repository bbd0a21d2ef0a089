"""A folder is complete or absent, and one process writes it at a time. Only regular files are opened."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG
from topw_deploy import folders
from topw_deploy.errors import ExportError
from topw_deploy.folders import atomic_file, require_space

MARKER = "mark.json"


def atomic_folder(output: Path, **options: Any) -> AbstractContextManager[Path]:
    return folders.atomic_folder(output, marker=MARKER, kind="a test's folder", **options)


def check_free(output: Path, *, overwrite: bool = False) -> None:
    folders.check_free(output, marker=MARKER, kind="a test's folder", overwrite=overwrite)


def write(output: Path, text: str, **options: Any) -> None:
    with atomic_folder(output, **options) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(text)
        (folder / MARKER).write_text(text)


def write_and_raise(output: Path, error: BaseException, **options: Any) -> None:
    with atomic_folder(output, **options) as folder:
        (folder / "file").touch()
        raise error


def contents(output: Path) -> str:
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    return (output / MARKER).read_text()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_folder_appears_at_the_end_with_its_parents_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with atomic_folder(out) as folder:
        (folder / MARKER).write_text("x")
        assert not out.exists()
    assert contents(out) == "x"


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "x")
    assert contents(tmp_path / "out") == "x"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing_or_the_earlier_folder(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_raise(tmp_path / "out", error())
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "out", "old")
    with pytest.raises(error), atomic_folder(tmp_path / "out", overwrite=True):
        raise error
    assert contents(tmp_path / "out") == "old"
    write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path / "out") == "new"


def test_a_failed_folder_is_kept_under_another_name_on_request(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            write_and_raise(tmp_path / "out", ValueError("wrong"), keep_failed=True)
        assert [path.name for path in tmp_path.rglob("*")] == ["out.failed", "file"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError(errno.EBUSY, "Device busy")])
def test_a_failed_rename_restores_the_earlier_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    write(tmp_path / "out", "old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".topw-partial-" in str(self.parent):
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)  # as on other systems than Linux
    with pytest.raises(ExportError, match=error.strerror or ""):
        write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path / "out") == "old"


@pytest.mark.parametrize(("number", "found"), [(1, "old"), (2, "new")])
def test_ctrl_c_right_after_a_rename_leaves_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, found: str
) -> None:
    """On systems without an exchange of folders in one step."""
    write(tmp_path / "out", "old")
    rename, renamed = Path.rename, list[Path]()

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        renamed.append(self)
        if len(renamed) == number:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted)
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path / "out") == found


@pytest.mark.parametrize("folder", ["out", "place"])
def test_a_second_writer_fails_at_once_and_names_the_first(tmp_path: Path, folder: str) -> None:
    (tmp_path / "place").mkdir()
    place = tmp_path / "place" if folder == "place" else None
    with atomic_folder(tmp_path / "out", place=place) as first:
        (first / MARKER).write_text("first")
        with pytest.raises(ExportError, match=rf"written by another process \(process {os.getpid()}, since 20\d\d-"):
            write(tmp_path / "out", "second", place=place)
    assert (tmp_path / "out" / MARKER).read_text() == "first"
    write(tmp_path / "out", "third", place=place, overwrite=True)


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / ".out.topw-partial-killed" / "out").mkdir(parents=True)
    (tmp_path / ".out.topw-lock").write_text("process 1, since 2000-01-01 00:00:00")
    write(tmp_path / "out", "x")
    assert contents(tmp_path / "out") == "x"


def test_a_folder_that_was_written_meanwhile_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "mine", "mine")
    with pytest.raises(ExportError, match="is not empty"), atomic_folder(tmp_path / "out"):
        shutil.copytree(tmp_path / "mine", tmp_path / "out")
    shutil.rmtree(tmp_path / "mine")
    assert contents(tmp_path / "out") == "mine"


def test_an_output_that_is_not_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match=r"is not empty.*--overwrite"):
        check_free(tmp_path)
    with pytest.raises(ExportError, match=r"holds files that are not a test's folder \(no mark.json\)"):
        check_free(tmp_path, overwrite=True)
    for path in (tmp_path / "file", tmp_path / "file" / "a" / "out"):
        with pytest.raises(ExportError, match="file is not a folder"):
            check_free(path, overwrite=True)
    with pytest.raises(ExportError, match="name too long"):
        check_free(tmp_path / ("a" * 300))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="is the current folder"):
        check_free(Path("."), overwrite=True)
    monkeypatch.setattr(os, "access", lambda *_arguments: False)
    with pytest.raises(ExportError, match=r"cannot be written.*Permission denied"):
        check_free(tmp_path / "out")


def test_too_little_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 5, 1_000_000))
    with pytest.raises(ExportError, match=r"1\.0 MB free, but needs 3\.0 GB more"):
        require_space(tmp_path, 3_000_000_000)


def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="disk is full"), atomic_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022, 0o002], ids=lambda mask: f"{mask:03o}")
def test_a_folder_and_its_replacement_follow_the_umask(tmp_path: Path, mask: int) -> None:
    above = tmp_path / "above"
    with umask(mask):
        write(above / "out", "x")
        write(above / "out", "x", overwrite=True)
        with atomic_file(above / "out" / "more") as stream:
            stream.write(b"x")
    for path in [above, *above.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask, path.name


WAITING = """
import sys, time
from pathlib import Path
place, model = map(Path, sys.argv[1:])
def wait(folder, *_):
    (folder / "file").write_text("x")
    print("ready", flush=True)
    time.sleep(600)
"""
FOLDER = """
from topw_deploy.folders import atomic_folder
with atomic_folder(place / "out", marker="x", kind="x") as folder:
    wait(folder)
"""
REPOSITORY = """
from topw_deploy.triton import repository
repository.shutil.copytree = lambda source, target, **_: wait(target.parents[1])
repository.write_repository(model, place, name="out")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [FOLDER, REPOSITORY], ids=["folder", "repository"])
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


def test_a_link_to_a_regular_file_is_followed_on_request(tmp_path: Path) -> None:
    """Files in the hub's cache are such links. tests/runtime/test_special_files.py has links that are not followed."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with folders.open_regular(tmp_path / "link", follow=True) as stream:
        assert stream.read() == b"content"
    (tmp_path / "device").symlink_to("/dev/zero")
    with pytest.raises(folders.NotRegularError, match="it is a device, not a regular file"):
        folders.open_regular(tmp_path / "device", follow=True)

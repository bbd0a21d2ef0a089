"""Opening only regular files, and writing them with umask permissions."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.special_files import OTHERS, SPECIAL, no_hang
from topw_deploy import files
from topw_deploy.files import NotRegularError, is_file_name, open_inside, open_regular, special_files

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
EVERY = {**SPECIAL, **OTHERS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "file").write_bytes(b"content")
    return tmp_path / "folder"


@pytest.fixture(params=[0o077, 0o027, 0o022, 0o002], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("by_parts", [True, False], ids=["by parts", "by path"])
def test_a_path_that_is_not_a_regular_file_is_not_opened(
    folder: Path, kind: str, by_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HAS_DIR_FD", by_parts)
    EVERY[kind](folder / "name")
    with no_hang(), pytest.raises(NotRegularError):
        open_inside(folder, "name")
    with no_hang(), pytest.raises(NotRegularError):
        open_regular(folder / "name")


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a link to a device", "a link to a pipe", "a folder"])
def test_a_link_that_may_be_followed_must_end_in_a_regular_file(folder: Path, kind: str) -> None:
    EVERY[kind](folder / "name")
    with no_hang(), pytest.raises(NotRegularError, match=r"not a regular file|Is a directory"):
        open_regular(folder / "name", follow=True)
    (folder / "link").symlink_to("sub/file")
    with open_regular(folder / "link", follow=True) as stream:
        assert stream.read() == b"content"


@pytest.mark.parametrize("by_parts", [True, False], ids=["by parts", "by path"])
def test_the_folder_may_be_a_link_but_no_path_inside_it(
    folder: Path, by_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_HAS_DIR_FD", by_parts)
    link = folder.with_name("link")
    link.symlink_to(folder)
    with open_inside(link, "sub/file") as stream:
        assert stream.read() == b"content"
    (folder / "inner").symlink_to("sub")
    with pytest.raises(NotRegularError, match="it is a symbolic link, not a regular file"):
        open_inside(folder, "inner/file")
    with pytest.raises(NotADirectoryError):
        open_inside(folder / "sub" / "file", "name")


def test_a_pipe_that_replaces_a_file_after_the_check_of_its_name_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.stat

    def swap(path: object, **options: object) -> os.stat_result:
        seen = look(path, **options)  # type: ignore[arg-type]
        if stat.S_ISREG(seen.st_mode):
            (folder / "sub" / "file").unlink()
            os.mkfifo(folder / "sub" / "file")
        return seen

    monkeypatch.setattr(os, "stat", swap)
    with no_hang(), pytest.raises(NotRegularError, match="it is a named pipe"):
        open_inside(folder, "sub/file")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a/", "..\\a", "C:\\a", "a\0b", None, 5, ["a"]])
def test_a_name_that_leaves_its_folder_is_not_the_name_of_a_file(name: object) -> None:
    assert not is_file_name(name)


@pytest.mark.parametrize("name", ["a", "...", ".hidden", "a b", "é", "..a"])
def test_any_other_text_is_the_name_of_a_file(name: str) -> None:
    assert is_file_name(name)


def test_special_files_are_found_wherever_they_are(folder: Path) -> None:
    for kind, make in EVERY.items():
        make(folder / kind.replace(" ", "-"))
    found = {(path.name, kind) for path, kind in special_files(folder)}
    assert found == {
        ("a-named-pipe", "a named pipe"),
        ("a-socket", "a socket"),
        ("a-link-to-a-device", "a link to a device"),
        ("a-link-to-a-pipe", "a link to a named pipe"),
    }
    assert list(special_files(folder.parent)) == []
    assert len(list(special_files(folder.parent, deep=True))) == len(found)
    assert list(special_files(folder.parent, deep=True, without="folder")) == []

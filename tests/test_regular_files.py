"""Only regular files are opened, and of a folder only those inside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.attacks import OTHERS, SPECIAL, no_hang
from topw_deploy.folders import NotRegularError, is_file_name, open_inside, open_regular

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
EVERY = {**SPECIAL, **OTHERS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "folder" / "sub" / "file").write_bytes(b"content")
    return tmp_path / "folder"


@pytest.mark.parametrize("kind", EVERY)
def test_a_path_that_is_not_a_regular_file_is_not_opened(folder: Path, kind: str) -> None:
    EVERY[kind](folder / "name")
    for opens in (lambda: open_inside(folder, "name"), lambda: open_regular(folder / "name")):
        with no_hang(), pytest.raises(NotRegularError, match="not a regular file"):
            opens()


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a link to a device", "a link to a pipe", "a folder"])
def test_a_link_that_may_be_followed_must_end_in_a_regular_file(folder: Path, kind: str) -> None:
    EVERY[kind](folder / "name")
    with no_hang(), pytest.raises(NotRegularError, match="not a regular file"):
        open_regular(folder / "name", follow=True)
    (folder / "link").symlink_to("sub/file")
    with open_regular(folder / "link", follow=True) as stream:
        assert stream.read() == b"content"


def test_the_folder_may_be_a_link_but_no_path_inside_it(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with open_inside(link, "sub/file") as stream:
        assert stream.read() == b"content"
    (folder / "inner").symlink_to("sub")
    with pytest.raises(NotRegularError, match="it is a symbolic link, not a regular file"):
        open_inside(folder, "inner/file")
    with pytest.raises(NotADirectoryError):
        open_inside(folder / "sub" / "file", "name")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a/", "..\\a", "C:\\a", "a\0b", None, 5, ["a"]])
def test_a_name_that_leaves_its_folder_is_not_the_name_of_a_file(name: object) -> None:
    assert not is_file_name(name)


@pytest.mark.parametrize("name", ["a", "...", ".hidden", "a b", "é", "..a"])
def test_any_other_text_is_the_name_of_a_file(name: str) -> None:
    assert is_file_name(name)

"""A pipe, socket, device, link or folder instead of a file: ManifestError without waiting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.attacks import OTHERS, SPECIAL, claim, no_hang
from topw_deploy.errors import ManifestError
from topw_deploy.manifest import MANIFEST_NAME, load_manifest
from topw_deploy.runtime import TopWModel, TopWSampler

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
EVERY = {**SPECIAL, **OTHERS}


@pytest.fixture
def folder(toy_folder: Path, tmp_path: Path) -> Path:
    """A copy to modify."""
    return Path(shutil.copytree(toy_folder, tmp_path / "copy"))


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    EVERY[kind](path)


@pytest.mark.parametrize("kind", EVERY)
def test_the_manifest_is_a_regular_file(folder: Path, kind: str) -> None:
    put(kind, folder / MANIFEST_NAME)
    for opens in (TopWModel.from_pretrained, TopWSampler.from_pretrained, load_manifest):
        with no_hang(), pytest.raises(ManifestError, match=r"topw_manifest.json.* is a .*, not a regular file"):
            opens(folder)


def test_a_link_to_the_manifest_itself_is_refused_and_one_to_the_folder_is_not(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert TopWModel.from_pretrained(link, provider="cpu").generate("a", max_new_tokens=1).token_ids
    (folder / MANIFEST_NAME).rename(tmp_path / "elsewhere.json")
    (folder / MANIFEST_NAME).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ManifestError, match="is a symbolic link, not a regular file; copy the folder again"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", ["tokenizer.json", "model.onnx"])
def test_a_listed_file_is_a_regular_file(folder: Path, name: str, kind: str) -> None:
    put(kind, folder / name)
    size = (folder / name).stat().st_size if kind.startswith(("a folder", "a link to a file")) else 0
    claim(folder, name, size)
    with no_hang(), pytest.raises(ManifestError, match=rf"{name} in .* is a .*, not a regular file"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("kind", EVERY)
def test_what_is_not_listed_is_not_read(folder: Path, kind: str) -> None:
    put(kind, folder / "chat_template.jinja")
    with no_hang():
        assert TopWModel.from_pretrained(folder, provider="cpu").generate("a", max_new_tokens=1).token_ids

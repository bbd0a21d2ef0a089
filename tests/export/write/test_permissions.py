"""Exports follow the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.tiny_models import export
from tests.test_manifest import a_manifest
from topw_deploy.export.sampler_only import export_sampler, sampler_request
from topw_deploy.export.write.staging import StagedFolder
from topw_deploy.manifest import MANIFEST_NAME, save_manifest
from topw_deploy.sampling.parameters import TopWOptions

pytestmark = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
MASKS = [0o077, 0o027, 0o022, 0o002]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def check_modes(folder: Path, mask: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        assert mode(path) == oct((0o777 if path.is_dir() else 0o666) & ~mask), path.name


def write_files(staged: StagedFolder) -> None:
    (staged.path / "sub").mkdir(exist_ok=True)
    (staged.path / "sub" / "file").write_text("x")
    save_manifest(staged.path, a_manifest())


def interrupt(staged: StagedFolder, write: Callable[[StagedFolder], None]) -> None:
    with staged:
        write(staged)
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask:03o}")
def test_a_folder_its_files_and_the_manifest_follow_the_umask(tmp_path: Path, mask: int) -> None:
    out = tmp_path / "above" / "out"
    with umask(mask), StagedFolder(out) as staged:
        write_files(staged)
        staged.commit()
    check_modes(out.parent, mask)
    assert {path.name for path in out.iterdir()} == {"sub", MANIFEST_NAME}


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask:03o}")
def test_a_replacement_follows_the_current_umask(tmp_path: Path, mask: int) -> None:
    for now in (0o022, mask):
        with umask(now), StagedFolder(tmp_path / "out", overwrite=True) as staged:
            write_files(staged)
            staged.commit()
    check_modes(tmp_path / "out", mask)


@pytest.mark.parametrize(("before", "now"), [(0o022, 0o077), (0o077, 0o022), (0o022, 0o002)])
def test_a_resumed_export_gets_the_permissions_of_a_new_one(tmp_path: Path, before: int, now: int) -> None:
    with umask(before), pytest.raises(KeyboardInterrupt):
        interrupt(StagedFolder(tmp_path / "out", resume=True), write_files)
    with umask(now), StagedFolder(tmp_path / "out", resume=True) as staged:
        (staged.path / "more").write_text("x")
        staged.commit()
    check_modes(tmp_path / "out", now)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_killed_while_it_set_permissions_is_resumed(tmp_path: Path) -> None:
    staged = StagedFolder(tmp_path / "out", resume=True)
    with pytest.raises(KeyboardInterrupt):
        interrupt(staged, write_files)
    (staged.workspace / ".out.topw-mode").mkdir(mode=0o700)
    (staged.workspace / ".out.topw-mode" / "file").touch()
    with StagedFolder(tmp_path / "out", resume=True) as resumed:
        assert (resumed.path / "sub" / "file").exists()


def test_a_hard_linked_file_keeps_its_permissions_in_a_resumed_export(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_text("w")
    weights.chmod(0o640)
    with pytest.raises(KeyboardInterrupt):
        interrupt(
            StagedFolder(tmp_path / "out", resume=True),
            lambda staged: os.link(weights, staged.path / "model.onnx_data"),
        )
    with umask(0o077), StagedFolder(tmp_path / "out", resume=True) as staged:
        staged.commit()
    assert mode(weights) == "0o640"


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0o077, 0o022], ids=lambda mask: f"{mask:03o}")
def test_a_whole_export_follows_the_umask(checkpoint: Callable[[str], Path], tmp_path: Path, mask: int) -> None:
    with umask(mask):
        export(checkpoint("llama_tied"), tmp_path / "out", verify=False)
    check_modes(tmp_path / "out", mask)


def test_a_sampler_follows_the_umask(tmp_path: Path) -> None:
    with umask(0o077):
        export_sampler(
            sampler_request(output=tmp_path / "out", vocab_size=64, options=TopWOptions(metric="uniform", top_m=25))
        )
    check_modes(tmp_path / "out", 0o077)

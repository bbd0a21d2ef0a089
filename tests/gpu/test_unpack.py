"""Unpacking: once each, in any order, nothing outside the folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import pack
from benchmarks.gpu.archives import INDEX, components, environment, unpack, unusable_components
from topw_deploy.errors import BenchmarkError

from .test_pack import HOST, LIMIT, refuse, stage_tree, write_tree

pytestmark = pytest.mark.slow


PACKAGES = {"onnxruntime": stage_tree, "tensorrt": refuse}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A component with a sliced file; another that could not be packed."""
    folder = tmp_path_factory.mktemp("packed") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_PACKAGES", PACKAGES)
        pack.pack(folder, ["onnxruntime", "tensorrt"], LIMIT, HOST)
    return folder


@pytest.fixture
def archives(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The archives of a copy."""
    monkeypatch.setattr(pack, "_PACKAGES", PACKAGES)
    return sorted(Path(shutil.copytree(packed, tmp_path / "pack")).glob("*.tar.xz"))


def test_unpacking_restores_the_packed_files(archives: list[Path], tmp_path: Path) -> None:
    assert unpack(archives, tmp_path / "host") == [
        "tensorrt was not packed: libthing.so has code for sm_120, none for sm_90."
    ]
    files = write_tree(tmp_path / "wanted")
    found = tmp_path / "host" / "onnxruntime"
    for name, content in files.items():
        assert (found / name.removeprefix("part/")).read_bytes() == content, name
    assert os.readlink(found / "lib" / "libcode.so") == "libcode.so.1.2"
    assert not list(found.rglob("*.slice-*"))


def test_archives_can_arrive_one_by_one_in_any_order(archives: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    for archive in reversed(archives[1:]):
        assert f"onnxruntime is not complete: unpack {archives[0].name}" in unpack([archive], host)[-1]
        assert components(host) == {}
    unpack([archives[0]], host)
    assert list(components(host)) == ["onnxruntime"]
    assert (host / "onnxruntime" / "large.bin").stat().st_size == 700_000


def test_an_interrupted_unpacking_is_resumed(archives: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    unpack(archives, host)
    done = json.loads((host / "unpacked.json").read_text(encoding="utf-8"))
    last = archives[-1].name
    (host / "unpacked.json").write_text(json.dumps({n: s for n, s in done.items() if n != last}), encoding="utf-8")
    assert f"onnxruntime is not complete: unpack {last}, too." in unusable_components(host)
    unpack([archives[-1]], host)
    assert list(components(host)) == ["onnxruntime"]
    assert not list(host.rglob("*.slice-*"))


def test_packed_packages_come_before_installed_ones(archives: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    assert environment(host, {"PATH": "/bin"}) == {"PATH": "/bin"}
    unpack(archives, host)
    found = environment(host, {"PYTHONPATH": "/installed", "PATH": "/bin"})
    assert found["PYTHONPATH"].split(os.pathsep) == [str(host / "onnxruntime"), "/installed"]
    assert found["LD_LIBRARY_PATH"] == str(host / "onnxruntime" / "lib")
    (host / "onnxruntime" / "numpy.py").write_text("here = True\n", encoding="utf-8")  # shadows an installed module
    run = subprocess.run(
        [sys.executable, "-c", "import numpy; print(numpy.here)"], env={**os.environ, **found}, capture_output=True
    )
    assert run.stdout == b"True\n", run.stderr


def test_an_archive_that_differs_from_its_index_is_refused(archives: list[Path], tmp_path: Path) -> None:
    archives[0].write_bytes(archives[0].read_bytes()[:-1] + b"x")
    with pytest.raises(BenchmarkError, match=r"has SHA-256 .* but pack\.json says"):
        unpack(archives, tmp_path / "host")
    assert components(tmp_path / "host") == {}


def test_archives_of_another_pack_are_refused(archives: list[Path], tmp_path: Path) -> None:
    unpack(archives, tmp_path / "host")
    pack.pack(tmp_path / "pack", ["onnxruntime"], 2 * LIMIT, HOST)
    with pytest.raises(BenchmarkError, match="holds the files of another pack"):
        unpack(sorted((tmp_path / "pack").glob("*.tar.xz")), tmp_path / "host")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}'])
def test_an_invalid_index_is_refused(archives: list[Path], tmp_path: Path, text: str) -> None:
    archives[0].with_name(INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(BenchmarkError, match="pack again"):
        unpack([archives[0]], tmp_path / "host")

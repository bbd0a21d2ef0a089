"""Unpacking: once each, in any order, nothing outside the folder."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.packing import command
from benchmarks.gpu.unpack import INDEX, components, environment, unpack, unusable_components
from topw_deploy.errors import BenchmarkError

from .test_pack import HOST, LIMIT, refuse, stage_tree, write_tree

pytestmark = pytest.mark.slow


PACKAGES = {"onnxruntime": stage_tree, "tensorrt": refuse}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A component with a sliced file; another that could not be packed."""
    folder = tmp_path_factory.mktemp("packed") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_PACKAGES", PACKAGES)
        command.pack(folder, ["onnxruntime", "tensorrt"], LIMIT, HOST)
    return folder


@pytest.fixture
def pack(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The archives of a copy."""
    monkeypatch.setattr(command, "_PACKAGES", PACKAGES)
    return sorted(Path(shutil.copytree(packed, tmp_path / "pack")).glob("*.tar.xz"))


def test_unpacking_restores_the_packed_files(pack: list[Path], tmp_path: Path) -> None:
    assert unpack(pack, tmp_path / "host") == [
        "tensorrt was not packed: libthing.so has code for sm_120, none for sm_90."
    ]
    files = write_tree(tmp_path / "wanted")
    found = tmp_path / "host" / "onnxruntime"
    for name, content in files.items():
        assert (found / name.removeprefix("part/")).read_bytes() == content, name
    assert os.readlink(found / "lib" / "libcode.so") == "libcode.so.1.2"
    assert not list(found.rglob("*.slice-*"))


def test_archives_can_arrive_one_by_one_in_any_order(pack: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    for archive in reversed(pack[1:]):
        assert f"onnxruntime is not complete: unpack {pack[0].name}" in unpack([archive], host)[-1]
        assert components(host) == {}
    unpack([pack[0]], host)
    assert list(components(host)) == ["onnxruntime"]
    assert (host / "onnxruntime" / "large.bin").stat().st_size == 700_000


def test_an_archive_is_unpacked_once(pack: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    unpack(pack, host)
    (host / "onnxruntime" / "small-1.txt").unlink()
    unpack(pack, host)
    assert not (host / "onnxruntime" / "small-1.txt").exists()


def test_an_interrupted_unpacking_is_resumed(pack: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    unpack(pack, host)
    done = json.loads((host / "unpacked.json").read_text(encoding="utf-8"))
    last = pack[-1].name
    (host / "unpacked.json").write_text(json.dumps({n: s for n, s in done.items() if n != last}), encoding="utf-8")
    assert f"onnxruntime is not complete: unpack {last}, too." in unusable_components(host)
    unpack([pack[-1]], host)
    assert list(components(host)) == ["onnxruntime"]
    assert not list(host.rglob("*.slice-*"))


def test_packed_packages_come_before_installed_ones(pack: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    assert environment(host, {"PATH": "/bin"}) == {"PATH": "/bin"}
    unpack(pack, host)
    found = environment(host, {"PYTHONPATH": "/installed", "PATH": "/bin"})
    assert found["PYTHONPATH"].split(os.pathsep) == [str(host / "onnxruntime"), "/installed"]
    assert found["LD_LIBRARY_PATH"] == str(host / "onnxruntime" / "lib")
    (host / "onnxruntime" / "numpy.py").write_text("here = True\n", encoding="utf-8")  # shadows an installed module
    run = subprocess.run(
        [sys.executable, "-c", "import numpy; print(numpy.here)"], env={**os.environ, **found}, capture_output=True
    )
    assert run.stdout == b"True\n", run.stderr


def test_an_archive_without_its_index_is_refused(pack: list[Path], tmp_path: Path) -> None:
    (tmp_path / "pack" / INDEX).unlink()
    with pytest.raises(BenchmarkError, match=r"has no pack\.json beside it"):
        unpack(pack, tmp_path / "host")


def test_an_archive_that_differs_from_its_index_is_refused(pack: list[Path], tmp_path: Path) -> None:
    pack[0].write_bytes(pack[0].read_bytes()[:-1] + b"x")
    with pytest.raises(BenchmarkError, match=r"has SHA-256 .* but pack\.json says"):
        unpack(pack, tmp_path / "host")
    assert components(tmp_path / "host") == {}


def test_archives_of_another_pack_are_refused(pack: list[Path], tmp_path: Path) -> None:
    unpack(pack, tmp_path / "host")
    command.pack(tmp_path / "pack", ["onnxruntime"], 2 * LIMIT, HOST)
    with pytest.raises(BenchmarkError, match="holds the files of another pack"):
        unpack(sorted((tmp_path / "pack").glob("*.tar.xz")), tmp_path / "host")


def member(name: str, content: bytes = b"", **settings: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for setting, value in settings.items():
        setattr(info, setting, value)
    return info, content


def crafted(folder: Path, *members: tuple[tarfile.TarInfo, bytes], size: int = 1 << 20) -> Path:
    """These members, with a matching index."""
    folder.mkdir(exist_ok=True)
    path = folder / "pack-onnxruntime-1.tar.xz"
    with lzma.open(path, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    index = {
        "format": 1, "slices": {}, "absent": {},
        "archives": [{"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}],
        "components": {"onnxruntime": {"archives": [path.name], "bytes": size}},
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return path


LINK = {"type": tarfile.SYMTYPE}


@pytest.mark.parametrize(
    "bad",
    [
        member("../evil", b"x"),
        member("onnxruntime/../../evil", b"x"),
        member("/tmp/evil", b"x"),
        member("other/evil", b"x"),
        member("onnxruntime", b"x"),
        member("onnxruntime/evil", linkname="/etc", **LINK),
        member("onnxruntime/evil", linkname="../..", **LINK),
        member("onnxruntime/evil", linkname="..", **LINK),
        member("onnxruntime/evil", linkname="sub/../../..", **LINK),
        member("onnxruntime/evil", linkname="onnxruntime/a", type=tarfile.LNKTYPE),
        member("onnxruntime/evil", type=tarfile.FIFOTYPE),
        member("onnxruntime/evil", type=tarfile.CHRTYPE),
    ],
)
def test_a_member_that_leads_out_of_the_folder_is_refused(tmp_path: Path, bad: tuple[tarfile.TarInfo, bytes]) -> None:
    archive = crafted(tmp_path / "pack", member("onnxruntime/good", b"good"), bad)
    with pytest.raises(BenchmarkError, match="refused"):
        unpack([archive], tmp_path / "host")
    assert not [path for path in tmp_path.rglob("evil*") if path.name == "evil"]
    assert components(tmp_path / "host") == {}


def test_an_existing_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "onnxruntime").symlink_to(outside)
    with pytest.raises(BenchmarkError, match="leads out of"):
        unpack([crafted(tmp_path / "pack", member("onnxruntime/evil", b"x"))], tmp_path / "host")
    assert not list(outside.iterdir())


def test_a_file_replaces_a_link_of_its_name_and_does_not_write_through_it(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept", encoding="utf-8")
    (tmp_path / "host" / "onnxruntime").mkdir(parents=True)
    (tmp_path / "host" / "onnxruntime" / "file").symlink_to(precious)
    unpack([crafted(tmp_path / "pack", member("onnxruntime/file", b"new"))], tmp_path / "host")
    assert precious.read_text(encoding="utf-8") == "kept"
    assert (tmp_path / "host" / "onnxruntime" / "file").read_bytes() == b"new"


def test_an_archive_that_unpacks_to_more_than_it_should_is_refused(tmp_path: Path) -> None:
    archive = crafted(tmp_path / "pack", member("onnxruntime/bomb", bytes(3_000_000)))
    with pytest.raises(BenchmarkError, match="unpacks to more than"):
        unpack([archive], tmp_path / "host")
    assert not (tmp_path / "host" / "onnxruntime" / "bomb").exists()


def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    archive = crafted(tmp_path / "pack", member("onnxruntime/good", b"good"))
    archive.write_bytes(b"plain text")
    index = json.loads((tmp_path / "pack" / INDEX).read_text(encoding="utf-8"))
    index["archives"][0]["sha256"] = hashlib.sha256(b"plain text").hexdigest()
    (tmp_path / "pack" / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(BenchmarkError, match=r"is not a readable \.tar\.xz file"):
        unpack([archive], tmp_path / "host")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}'])
def test_an_invalid_index_is_refused(tmp_path: Path, text: str) -> None:
    archive = crafted(tmp_path / "pack", member("onnxruntime/good", b"good"))
    (tmp_path / "pack" / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(BenchmarkError, match="pack again"):
        unpack([archive], tmp_path / "host")

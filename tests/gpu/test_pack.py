"""Packed components: from small wheels with the real layout, and unpacked on a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import pack
from benchmarks.gpu.archives import SUFFIX, components, environment, unpack, write
from benchmarks.gpu.pack import Host
from topw_deploy.errors import BenchmarkError
from topw_deploy.runtime import TopWModel

from .fatbin_files import CUBIN, elf, entry, fat_binary

pytestmark = pytest.mark.slow

HOST = Host()
FOR_90 = elf([(".nv_fatbin", fat_binary(entry(CUBIN, 80, b"old " * 9), entry(CUBIN, 90, b"wanted! " * 9)))])
FOR_120 = elf([(".nv_fatbin", fat_binary(entry(CUBIN, 120, b"new " * 9)))])
WHEELS: dict[str, dict[str, bytes]] = {
    pack.ONNXRUNTIME: {
        f"onnxruntime/{file}": FOR_90 if "cuda" in file else b"x"
        for file in ("__init__.py", "capi/onnxruntime_pybind11_state.so", "capi/libonnxruntime.so.1.31.1",
                     "capi/libonnxruntime_providers_shared.so", "capi/libonnxruntime_providers_tensorrt.so",
                     "capi/libonnxruntime_providers_cuda.so", "transformers/models/big.py", "tools/convert.py")
    },
    pack.RTX: {"rtx/libtensorrt_rtx.so.1.7.1": FOR_90, "rtx/libtensorrt_onnxparser_rtx.so.1.7.1": b"parser",
               "rtx/libtensorrt_plugins.so": b"large and not used"},
    pack.BINDINGS: {"tensorrt_bindings/__init__.py": b"", "tensorrt_bindings/tensorrt.so": b"x"},
}  # fmt: skip
Serve = Callable[[Mapping[str, Mapping[str, bytes]]], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve these files as wheels."""

    def put(served: Mapping[str, Mapping[str, bytes]]) -> None:
        def fetch(requirement: str, host: Host, into: Path) -> str:
            for name, content in served[requirement].items():
                path = into / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return requirement.split("==")[1]

        monkeypatch.setattr(pack, "fetch", fetch)

    return put


@pytest.fixture
def packed(serve: Serve, tmp_path: Path) -> list[Path]:
    """Archives of onnxruntime and TensorRT."""
    serve(WHEELS)
    assert pack.pack(tmp_path / "pack", ["onnxruntime", "tensorrt"], HOST) == 0
    return sorted((tmp_path / "pack").iterdir())


def test_only_what_sessions_load_is_packed(packed: list[Path], tmp_path: Path) -> None:
    unpack(packed, tmp_path / "host")
    onnxruntime, tensorrt = components(tmp_path / "host")
    assert {path.relative_to(onnxruntime).as_posix() for path in onnxruntime.rglob("*") if path.is_file()} == {
        "onnxruntime/__init__.py",
        "onnxruntime/capi/onnxruntime_pybind11_state.so",
        "onnxruntime/capi/libonnxruntime_providers_shared.so",
        "onnxruntime/capi/libonnxruntime_providers_cuda.so",
    }
    library = (onnxruntime / "onnxruntime/capi/libonnxruntime_providers_cuda.so").read_bytes()
    assert b"wanted!" in library
    assert b"old" not in library
    assert {path.name: os.readlink(path) for path in (tensorrt / "rtx").iterdir() if path.is_symlink()} == {
        "libnvinfer.so.11": "libtensorrt_rtx.so.1.7.1",
        "libtensorrt_rtx.so": "libtensorrt_rtx.so.1.7.1",
        "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.1.7.1",
    }
    assert (tensorrt / "rtx" / "libnvinfer_plugin.so.11").read_bytes()[:4] == b"\x7fELF"
    assert (tensorrt / "tensorrt_bindings" / "tensorrt.so").is_file()


@pytest.mark.parametrize(
    ("wheels", "reason"),
    [
        ({pack.RTX: {**WHEELS[pack.RTX], "rtx/libtensorrt_rtx.so.1.7.1": FOR_120}}, "for sm_120, none for sm_90"),
        ({pack.RTX: {}}, "its layout changed"),
    ],
)
def test_a_component_that_cannot_be_packed_is_named(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], wheels: dict[str, Any], reason: str
) -> None:
    serve({**WHEELS, **wheels})
    assert pack.pack(tmp_path, ["tensorrt", "onnxruntime"], HOST) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["pack-onnxruntime.tar.xz"]
    said = capsys.readouterr().err
    assert "NOT PACKED tensorrt: " in said
    assert reason in said


def test_the_same_files_give_the_same_archive_which_tar_reads(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "lib").mkdir(parents=True)
    (tree / "lib" / "code.so").write_bytes(b"code" * 1000)
    (tree / "link").symlink_to("lib/code.so")
    write(tree, tmp_path / "first")
    (tree / "lib" / "code.so").touch()
    write(tree, tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    listed = subprocess.run(["tar", "-tJf", tmp_path / "first"], check=True, capture_output=True, text=True).stdout
    assert listed.splitlines() == ["lib/", "lib/code.so", "link"]


def test_packed_packages_come_before_installed_ones(packed: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    assert environment(host, {"PATH": "/bin"}) == {"PATH": "/bin"}
    unpack(packed, host)
    found = environment(host, {"PYTHONPATH": "/installed", "PATH": "/bin"})
    assert found["PYTHONPATH"].split(os.pathsep) == [*map(str, components(host)), "/installed"]
    assert found["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(host / "pack-tensorrt" / "rtx")
    (components(host)[0] / "numpy.py").write_text("here = True\n", encoding="utf-8")  # shadows an installed module
    run = subprocess.run(
        [sys.executable, "-c", "import numpy; print(numpy.here)"], env={**os.environ, **found}, capture_output=True
    )
    assert run.stdout == b"True\n", run.stderr


def test_an_archive_is_unpacked_once_and_again_when_it_changed(packed: list[Path], tmp_path: Path) -> None:
    host = tmp_path / "host"
    for _ in range(2):
        unpack(packed[:1], host)
        (components(host)[0] / "mark").touch()
    assert (components(host)[0] / "mark").is_file()
    packed[1].rename(packed[0])
    unpack(packed[:1], host)
    assert not (components(host)[0] / "mark").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"text", lambda data: data[:200] + data])
def test_a_damaged_archive_is_refused(packed: list[Path], tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    packed[0].write_bytes(damage(packed[0].read_bytes()))
    with pytest.raises(BenchmarkError, match="cannot be unpacked"):
        unpack(packed, tmp_path / "host")
    assert components(tmp_path / "host") == []


@pytest.mark.long
def test_the_demo_is_packed_with_the_cpus_tokens(packed_demo: list[Path], tmp_path: Path) -> None:
    assert [path.name.removesuffix(SUFFIX) for path in packed_demo] == ["pack-folders", "pack-packages"]
    unpack(packed_demo, tmp_path)
    folder = tmp_path / "pack-folders" / "float16-gqa"
    recorded = json.loads(folder.with_name("float16-gqa.tokens.json").read_text(encoding="utf-8"))
    assert len(recorded["tokens"]) == 32
    with TopWModel.from_pretrained(folder, provider="cpu") as model:
        assert model.generate(**recorded["requests"][0]).token_ids == recorded["tokens"][0]

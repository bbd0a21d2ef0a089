"""Packed files, from small wheels with the real layout."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.gpu import pack
from benchmarks.gpu.pack import Host

from .fatbin_files import CUBIN, elf, entry, fat_binary

HOST = Host(90, "3.12")
FOR_90 = elf([(".nv_fatbin", fat_binary(entry(CUBIN, 80, b"old " * 9), entry(CUBIN, 90, b"wanted! " * 9)))])
FOR_120 = elf([(".nv_fatbin", fat_binary(entry(CUBIN, 120, b"new " * 9)))])
Serve = Callable[[Mapping[str, Mapping[str, bytes]]], None]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve these files as wheels; other wheels are empty."""

    def put(served: Mapping[str, Mapping[str, bytes]]) -> None:
        def fetch(requirement: str, host: Host, into: Path) -> Path:
            name, version = requirement.split("==")
            path = into / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(path, "w") as wheel:
                for file, content in served.get(name, {}).items():
                    wheel.writestr(file, content)
            return path

        monkeypatch.setattr(pack, "download_wheel", fetch)

    return put


def names(tree: Path) -> set[str]:
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir()}


def onnxruntime_wheel(provider: bytes) -> dict[str, bytes]:
    files = ("__init__.py", "capi/onnxruntime_pybind11_state.so", "capi/libonnxruntime.so.1.31.1",
             "capi/libonnxruntime_providers_shared.so", "capi/libonnxruntime_providers_tensorrt.so",
             "transformers/models/big.py", "quantization/base.py", "tools/convert.py")  # fmt: skip
    found = {f"onnxruntime/{file}": b"x" for file in files}
    return found | {
        "onnxruntime/capi/libonnxruntime_providers_cuda.so": provider,
        "onnxruntime_gpu-1.31.1.dist-info/METADATA": b"Name: onnxruntime-gpu\n",
    }


def test_only_what_sessions_load_of_onnxruntime_is_packed(serve: Serve, tmp_path: Path, scratch: Path) -> None:
    serve({"onnxruntime-gpu": onnxruntime_wheel(FOR_90)})
    packed = pack.stage_onnxruntime(tmp_path / "tree", scratch, HOST)
    assert names(tmp_path / "tree") == {
        "onnxruntime/__init__.py",
        "onnxruntime/capi/onnxruntime_pybind11_state.so",
        "onnxruntime/capi/libonnxruntime_providers_shared.so",
        "onnxruntime/capi/libonnxruntime_providers_cuda.so",
        "onnxruntime_gpu-1.31.1.dist-info/METADATA",
    }
    assert (packed.version, packed.python_path, packed.cuda_libraries) == ("1.31.1", (".",), True)
    library = (tmp_path / "tree/onnxruntime/capi/libonnxruntime_providers_cuda.so").read_bytes()
    assert b"wanted!" in library
    assert b"old" not in library
    assert packed.gpu_code["libonnxruntime_providers_cuda.so"].kept == {"sm_90": 1}


def tensorrt_wheels(builder: bytes) -> dict[str, dict[str, bytes]]:
    package = "onnxruntime_ep_nv_tensorrt_rtx"
    return {
        "onnxruntime-ep-nv-tensorrt-rtx-cu13": {
            f"{package}/libtensorrt_rtx.so.1.7.1": builder,
            f"{package}/libtensorrt_onnxparser_rtx.so.1.7.1": b"parser",
            f"{package}/libtensorrt_plugins.so": b"large and not used",
        },
        "tensorrt-cu13-bindings": {"tensorrt_bindings/__init__.py": b"", "tensorrt_bindings/tensorrt.so": b"x"},
    }


def test_tensorrt_rtx_is_packed_under_tensorrts_names(serve: Serve, tmp_path: Path, scratch: Path) -> None:
    serve(tensorrt_wheels(FOR_90))
    packed = pack.stage_tensorrt(tmp_path / "tree", scratch, HOST)
    library = tmp_path / "tree" / "lib"
    assert {path.name: os.readlink(path) for path in library.iterdir() if path.is_symlink()} == {
        "libnvinfer.so.11": "libtensorrt_rtx.so.1.7.1",
        "libtensorrt_rtx.so": "libtensorrt_rtx.so.1.7.1",
        "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.1.7.1",
    }
    assert (library / "libnvinfer_plugin.so.11").read_bytes()[:4] == b"\x7fELF"
    assert (tmp_path / "tree" / "tensorrt_bindings" / "tensorrt.so").is_file()
    assert not list((tmp_path / "tree").rglob("libtensorrt_plugins.so"))
    assert packed.version == "TensorRT-RTX 1.7.1, bindings 11.4.0.106"
    assert packed.linker_path == ("lib",)
    assert packed.gpu_code["libtensorrt_rtx.so.1.7.1"].found == {"sm_80": 1, "sm_90": 1}

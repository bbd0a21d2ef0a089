"""`topw plugins`: what is built and shown. What nvcc makes of it is in tests/plugins/cuda/test_nvcc.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from topw_deploy.cli import doctor
from topw_deploy.errors import PluginError
from topw_deploy.plugins import cuda_build, driver, report
from topw_deploy.plugins.tensorrt import build as tensorrt_build

from .conftest import Invoke


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Arguments of the builds that would have been made."""
    asked: list[tuple[Any, ...]] = []

    def build(output: Path | None, architectures: tuple[int, ...], tell: Any) -> cuda_build.Built:
        asked.append((output, architectures))
        tell("nvcc 13.0")
        return cuda_build.Built(output or tmp_path / "lib.so", architectures, "13.0", 61.4, 4_200_000)

    monkeypatch.setattr(cuda_build, "build", build)
    return asked


def test_the_path_of_the_library_is_the_output_and_the_rest_is_told_beside(
    invoke: Invoke, built: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    result = invoke("plugins", "build", "--cuda", "--output", tmp_path / "mine.so")
    assert result.stdout == f"{tmp_path / 'mine.so'}\n"
    assert result.stderr == "nvcc 13.0\n4.2 MB in 61 s\n"
    assert built == [(tmp_path / "mine.so", ())]


@pytest.mark.parametrize("words", ["87,90", "sm_87,sm_90", "8.7 9.0", "compute_87, 90"])
def test_architectures_are_spelled_as_people_know_them(
    invoke: Invoke, built: list[tuple[Any, ...]], words: str
) -> None:
    assert invoke("plugins", "build", "--cuda", "--arch", words).exit_code == 0
    assert built == [(None, (87, 90))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cuda", "--arch", "hopper"], "'hopper' is no architecture such as 87, sm_87 or 8.7."),
        (["--cuda", "--arch", ","], "it is empty, but must name architectures such as 87."),
        ([], "say what to build"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    invoke: Invoke, built: list[tuple[Any, ...]], words: list[str], message: str
) -> None:
    result = invoke("plugins", "build", *words)
    assert (result.exit_code, result.stdout, built) == (2, "", [])
    assert message in result.stderr


def test_without_nvcc_the_reason_is_one_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(PluginError, match="CUDA_HOME is '/nowhere', where there is no bin/nvcc"):
        invoke("plugins", "build", "--cuda")


FOUND = report.Report(
    report.CpuLibrary("/lib/libtopw.so", "avx2", ""),
    report.CudaLibrary("/lib/libtopw_cuda.so", (75, 90), ""),
    driver.Driver("13.0", (driver.Device("NVIDIA H200", 90),), ""),
    report.TensorRTLibrary("/lib/libtopw_tensorrt.so", ""),
)


def test_what_is_there_is_shown(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "look", lambda: FOUND)
    assert invoke("plugins", "show").stdout.splitlines() == [
        "CPU library   /lib/libtopw.so, avx2",
        "CUDA library  /lib/libtopw_cuda.so, sm_75 sm_90",
        "TRT library   /lib/libtopw_tensorrt.so",
        "GPU 0         NVIDIA H200, sm_90",
        "driver        runs CUDA 13.0",
    ]
    found = json.loads(invoke("plugins", "show", "--json").stdout)
    assert found["cuda"]["architectures"] == [75, 90]
    assert found["driver"]["devices"] == [{"name": "NVIDIA H200", "architecture": 90}]


def test_tensorrts_library_is_shown_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TOPW_TENSORRT_LIBRARY", raising=False)
    monkeypatch.setattr(tensorrt_build, "PACKAGED", tmp_path / "libtopw_tensorrt.so")
    assert "topw plugins build --tensorrt-root DIR" in report.tensorrt_library().why_none
    (tmp_path / "libtopw_tensorrt.so").touch()
    assert report.tensorrt_library().path == str(tmp_path / "libtopw_tensorrt.so")
    monkeypatch.setenv("TOPW_TENSORRT_LIBRARY", "/nowhere")
    assert report.tensorrt_library().why_none == "TOPW_TENSORRT_LIBRARY names /nowhere, which is no file"


def test_doctor_tells_of_the_cuda_library_and_of_the_driver(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "look", lambda: FOUND)
    assert set(invoke("doctor").stdout.splitlines()) >= {
        "CUDA sampler: for the GPU here, sm_75 sm_90, /lib/libtopw_cuda.so",
        "NVIDIA driver: runs CUDA 13.0, NVIDIA H200, sm_90",
    }
    missing = report.CudaLibrary(None, (), "it was not built here")
    without = dataclasses.replace(FOUND, cuda=missing, driver=driver.Driver(None, (), "none"))
    monkeypatch.setattr(report, "look", lambda: without)
    assert doctor._cuda_lines(doctor._cuda()) == ["CUDA sampler: none (it was not built here)", "NVIDIA driver: none"]

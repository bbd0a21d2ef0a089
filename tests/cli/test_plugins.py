"""`topw plugins`, without a compiler: tests/plugins/cuda/test_nvcc.py tests nvcc."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.invoking import Invoke
from topw_deploy.errors import PluginError
from topw_deploy.plugins import library, nvcc
from topw_deploy.plugins.nvcc import CompiledLibrary


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Arguments of the intercepted builds."""
    asked: list[tuple[Any, ...]] = []

    def build(output: Path | None, architectures: tuple[int, ...], say: Any) -> CompiledLibrary:
        asked.append((output, architectures))
        say("nvcc 13.0")
        return CompiledLibrary(output or tmp_path / "lib.so", (87, 90), "13.0", 61.4, 4_200_000)

    monkeypatch.setattr(nvcc, "compile_cuda", build)
    return asked


def test_the_path_of_the_library_goes_to_stdout_and_progress_to_stderr(
    invoke: Invoke, built: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    result = invoke("plugins", "build", "--cuda", "--output", tmp_path / "mine.so")
    assert result.stdout == f"{tmp_path / 'mine.so'}\n"
    assert result.stderr.splitlines() == ["nvcc 13.0", "4.2 MB for sm_87 sm_90 in 61 s"]
    assert built == [(tmp_path / "mine.so", ())]
    assert invoke("plugins", "build", "--cuda", "--quiet").stderr == ""


def test_native_stands_for_the_gpus_that_the_driver_lists(
    invoke: Invoke, built: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library.Driver(
        "13.0", (library.Device("Orin", 87), library.Device("H200", 90), library.Device("H200", 90)), ""
    )
    monkeypatch.setattr(library, "query_driver", lambda: found)
    assert invoke("plugins", "build", "--cuda", "--architecture", "native", "--architecture", "8.0").exit_code == 0
    assert built == [(None, (80, 87, 90))]
    monkeypatch.setattr(library, "query_driver", lambda: library.Driver(None, (), "there is no NVIDIA driver"))
    with pytest.raises(PluginError, match="'native' means the GPU of this machine, but there is no NVIDIA driver"):
        invoke("plugins", "build", "--cuda", "--arch", "native")


def test_architectures_may_be_written_in_all_usual_ways(invoke: Invoke, built: list[tuple[Any, ...]]) -> None:
    for words in ("87,90", "sm_87,sm_90", "8.7 9.0", "compute_87, 90", "8.7;9.0"):
        assert invoke("plugins", "build", "--cuda", "--architecture", words).exit_code == 0
    assert built == [(None, (87, 90))] * 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cuda", "--arch", "hopper"], "'hopper' is not an architecture; write 87, sm_87, 8.7 or native"),
        (["--cuda", "--architecture", "sm_90a"], "Known: sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100"),
        ([], "Missing option '--cuda'"),
    ],
)
def test_a_wrong_architecture_and_a_missing_target_are_usage_errors(
    invoke: Invoke, built: list[tuple[Any, ...]], words: list[str], message: str
) -> None:
    result = invoke("plugins", "build", *words)
    assert (result.exit_code, result.stdout, built) == (2, "", [])
    assert message in " ".join(result.stderr.split())


def test_without_nvcc_the_reason_is_one_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(PluginError, match="CUDA_HOME is '/nowhere', which has no bin/nvcc"):
        invoke("plugins", "build", "--cuda")


FOUND = library.Status(
    library.CpuStatus("/lib/libtopw.so", "avx2", ""),
    library.CudaStatus("/lib/libtopw_cuda.so", (75, 90), ""),
    library.Driver("13.0", (library.Device("NVIDIA H200", 90),), ""),
)


def test_the_installed_libraries_and_gpus_are_shown(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "read_status", lambda: FOUND)
    shown = (
        "CPU library   /lib/libtopw.so, avx2\n"
        "CUDA library  /lib/libtopw_cuda.so, sm_75 sm_90\n"
        "GPU 0         NVIDIA H200, sm_90\n"
        "driver        runs CUDA 13.0\n"
    )
    assert shown in invoke("doctor").stdout
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["cuda"]["architectures"] == [75, 90]
    assert found["driver"]["devices"] == [{"name": "NVIDIA H200", "architecture": 90}]

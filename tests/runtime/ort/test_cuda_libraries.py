"""CUDA libraries load from Python packages before the first GPU session; missing ones are named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from tests.support.toy_model import Toy, export
from topw_deploy import install
from topw_deploy.cli import doctor
from topw_deploy.errors import ProviderError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import graph_session, providers

NOT_FOUND = "cannot open shared object file: No such file or directory"
Preload = Callable[[Callable[..., None]], list[Any]]


@pytest.fixture
def preload(monkeypatch: pytest.MonkeyPatch) -> Preload:
    """Replaces onnxruntime.preload_dlls in a fresh process state. Returns the folders it is called for."""
    monkeypatch.setattr(providers, "_first_result", [])
    monkeypatch.setattr(providers.importlib.util, "find_spec", lambda _name: None)

    def use(does: Callable[..., None]) -> list[Any]:
        calls: list[Any] = []

        def preload_dlls(directory: str | None = None) -> None:
            calls.append(directory)
            does(directory)

        monkeypatch.setattr(ort, "preload_dlls", preload_dlls, raising=False)
        return calls

    return use


def find_nothing(_directory: str | None) -> None:
    print(f"Failed to load libcublasLt.so.13: libcublasLt.so.13: {NOT_FOUND}")  # noqa: T201  # as onnxruntime does
    print(f"Failed to load /opt/nvidia/libcurand.so.10: {NOT_FOUND}")  # noqa: T201
    print("Please follow https://onnxruntime.ai/docs/install/#cuda-and-cudnn to install CUDA.")  # noqa: T201


def test_libraries_are_loaded_once_and_the_console_stays_clean(
    preload: Preload, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = preload(find_nothing)
    command = install.install_command("gpu")
    expected = f"onnxruntime found no libcublasLt.so.13, libcurand.so.10; to install them, run: {command}"
    assert {providers.preload_libraries() for _ in range(3)} == {expected}
    assert calls == [None]
    assert capfd.readouterr() == ("", "")


def test_threads_that_come_at_once_load_once(preload: Preload) -> None:
    calls = preload(lambda _directory: None)
    threads = [threading.Thread(target=providers.preload_libraries) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [None]


def test_packages_in_other_folders_are_looked_through_where_something_is_missing(
    preload: Preload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """onnxruntime is installed per user, and CUDA comes with the system's PyTorch."""
    for package, library in (("cudnn", "libcudnn.so.9"), ("cu13", "libcublas.so.13"), ("nccl", "libnccl.so.2")):
        (tmp_path / "nvidia" / package / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / package / "lib" / library).touch()
    spec = ModuleSpec("nvidia", None, is_package=True)
    beside = str(Path(ort.__file__).parents[1] / "nvidia")
    spec.submodule_search_locations = [beside, str(tmp_path / "nvidia")]
    monkeypatch.setattr(providers.importlib.util, "find_spec", lambda _name: spec)
    calls = preload(lambda directory: find_nothing(directory) if directory is None else None)
    assert providers.preload_libraries() == ""
    folders = [str(tmp_path / "nvidia" / package / "lib") for package in ("cu13", "cudnn")]
    assert calls == [None, *folders]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    return export(tmp_path / "toy", Toy.random(0))


def test_a_session_on_the_cpu_loads_nothing(preload: Preload, folder: Path) -> None:
    calls = preload(find_nothing)
    TopWModel.from_pretrained(folder, provider="cpu")
    assert calls == []


def without_cuda(folder: Any, chain: list[Any], options: ort.SessionOptions) -> ort.InferenceSession:
    return ort.InferenceSession(folder.model, options, providers=["CPUExecutionProvider"])


def test_a_provider_that_does_not_start_says_what_is_missing(
    preload: Preload, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = preload(find_nothing)
    monkeypatch.setattr(graph_session, "_new_session", without_cuda)
    with pytest.raises(ProviderError, match=r"would run on cpu \(onnxruntime found no libcublasLt\.so\.13, libcurand"):
        TopWModel.from_pretrained(folder, provider="cuda")
    with pytest.warns(RuntimeWarning, match=r"cuda could not start, running on cpu: onnxruntime found no libcublasLt"):
        TopWModel.from_pretrained(folder, provider="cuda", allow_fallback=True)
    assert calls == [None]


def test_doctor_says_what_is_missing(preload: Preload, folder: Path) -> None:
    preload(find_nothing)
    assert "onnxruntime found no libcublasLt.so.13" in doctor.diagnose()["providers"]["cuda"]

"""Fixtures that run onnxruntime's CUDA provider without a GPU, on a stand-in for CUDA."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.cuda import tools
from tests.support.cuda_kernel import CUDA_SOURCES, compiled
from tests.support.shared import skip_or_fail
from tests.support.tiny_models import export, write_checkpoint
from topw_deploy.plugins import compile_native, nvcc

from .make_stand_in import make

HERE = Path(__file__).parent
SOURCE = Path(compile_native.__file__).parents[2]
Generate = Callable[..., dict[str, Any]]
Run = Callable[..., dict[str, Any]]
Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def python() -> Path:
    path = tools.ROOT / "onnxruntime" / "bin" / "python"
    if not path.is_file():
        skip_or_fail(f"{tools.ROOT / 'onnxruntime'} does not exist; run `make cuda-tools`")
    return path


@pytest.fixture(scope="session")
def stand_in(python: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of the stand-ins for CUDA's libraries, compiled once."""
    (provider,) = python.parents[1].glob("lib/python*/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so")
    digest = hashlib.sha256(str(provider.stat().st_size).encode())
    for source in ("stand_in.cpp", "make_stand_in.py"):
        digest.update((HERE / source).read_bytes())
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("stand-in") / digest.hexdigest()[:16]
    if not (folder / "ready").is_file():
        try:
            with pytest.MonkeyPatch.context() as patch:
                home = tools.home()
                if home is not None:
                    patch.setenv("CUDA_HOME", str(home))
                make(folder, provider, nvcc.find_toolkit().headers)
        except (compile_native.NotBuiltError, subprocess.CalledProcessError) as error:
            pytest.fail(f"the stand-in does not compile: {getattr(error, 'stderr', error)}")
        (folder / "ready").touch()
    return folder


@pytest.fixture(scope="session")
def cuda_library(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    sources = [
        HERE / "sampler_kernels.cpp",
        CUDA_SOURCES / "ort_cuda.cpp",
        *sorted(compile_native.SOURCES.glob("*.cpp")),
    ]
    return compiled(request.config.cache.mkdir("emulated"), sources, ["-DTOPW_WITH_CUDA=90"])


@pytest.fixture(scope="session")
def run(python: Path, stand_in: Path, cuda_library: Path) -> Run:
    """(script of this folder, *arguments, native=True) -> its JSON output."""

    def start(script: str, *arguments: object, native: bool = True) -> dict[str, Any]:
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(stand_in),
            "PYTHONPATH": str(SOURCE),
            "TOPW_CUDA_LIBRARY": str(cuda_library),
            "TOPW_NATIVE": str(int(native)),
        }
        command = [str(python), str(HERE / script), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return start


@pytest.fixture(scope="session")
def generate(run: Run) -> Generate:
    """(folder, requests, native=True, **from_pretrained's arguments) -> worker.py's answer."""

    def answer(
        folder: Path, requests: Sequence[dict[str, Any]] = (), *, native: bool = True, **settings: Any
    ) -> dict[str, Any]:
        chosen = json.dumps({"provider": "cuda", **settings})
        return run("worker.py", folder, chosen, json.dumps(list(requests)), native=native)

    return answer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """(family, **export arguments) -> the folder, exported once."""

    @functools.cache
    def find(family: str, **settings: Any) -> Path:
        root = tmp_path_factory.mktemp("exported")
        export(write_checkpoint(root / "checkpoint", family), root / "out", **settings)
        return root / "out"

    return find

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import models, pack
from benchmarks.gpu.device import DeviceKernel
from benchmarks.gpu.job import Job
from tests.plugins.conftest import emulated_library  # noqa: F401  # a fixture
from tests.support.shared import made_once, skip_or_fail
from tests.support.toy_model import Toy, export
from topw_deploy.sampling import TopWOptions

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernel(emulated_library: Path) -> DeviceKernel:  # noqa: F811
    return DeviceKernel(emulated_library, torch.device("cpu"))


@pytest.fixture(scope="session")
def packed_demo(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Archives of the float16 bundled model with the CPU's tokens, and of the runtime's packages."""

    def make(into: Path) -> None:
        assert pack.main(["--only", "folders", "packages", "--into", str(into), "--rehearse"]) == 0

    return sorted(made_once(tmp_path_factory, "packed-demo", make).glob("*.tar.xz"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of 128 tokens and the CPU's tokens."""
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))
    folder = export(tmp_path_factory.mktemp("packed") / "toy", toy, form="scatter", max_length=128)
    models.record_tokens(folder, models.requests(seeds=1, tokens=12))
    return folder


@pytest.fixture
def job(tmp_path: Path, exported: Path) -> Job:
    library = tmp_path / "libtopw_cuda.so"
    library.touch()
    return Job(tmp_path / "out", library, rehearse=True, folders=[str(exported)], rounds=2)


@pytest.fixture(scope="session")
def host() -> Path:
    """A Python with a GPU host's packages, without this project."""
    python = ROOT / ".venv-host" / "bin" / "python"
    if not (ROOT / ".venv-host" / "ready.stamp").is_file():
        skip_or_fail(f"{python.parents[1]} is not ready; `make host` makes it")
    return python

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.samples import slow
from tests.support.toy_model import Load, Toy, export
from topw_deploy.plugins import library
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions


@pytest.fixture(scope="session", params=["graph" if library.why_absent() else slow("graph"), "native"])
def sampler_choice(request: pytest.FixtureRequest) -> str:
    """Parametrizes tests over both samplers."""
    if request.param == "native" and library.why_absent():
        pytest.skip(f"no native sampler: {library.why_absent()}")
    return str(request.param)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Export a toy model to the test's folder and open it, natively if built. Keywords: see `toy_model.export`."""
    count = 0

    def open_toy(toy: Toy, **settings: Any) -> TopWModel:
        nonlocal count
        count += 1
        folder = export(tmp_path / f"toy{count}", toy, **settings)
        return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)

    return open_toy


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="session")
def toy_folder(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("toy") / "export", toy, with_mass=True)


@pytest.fixture(scope="session")
def model(toy_folder: Path, sampler_choice: str) -> TopWModel:
    """A model with random logits, geometry and mass output."""
    return TopWModel.from_pretrained(toy_folder, provider="cpu", intra_op_num_threads=1, sampler=sampler_choice)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.invoking import invoke  # noqa: F401  # a fixture
from tests.support.toy_model import Toy, export
from topw_deploy.sampling import TopWOptions

GEOMETRY = {"lam": 0.6, "beta": 3.0, "init_top_p": 0.4, "geom_scale": 0.3}
"""Parameters under which the toy model's distances change some kept sets and not others."""


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(3, options=TopWOptions(top_m=40, metric="mahalanobis"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, toy: Toy) -> Path:
    return export(tmp_path_factory.mktemp("toy") / "out", toy, with_mass=True)

"""A toy model over single bytes, whose logits are random."""

from __future__ import annotations

import pytest

from tests.support.toy_model import Toy, export
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="session")
def model(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    """Random logits over single bytes, with a cache that engines take."""
    folder = export(tmp_path_factory.mktemp("toy") / "export", toy, form="grouped")
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)

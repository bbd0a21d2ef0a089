"""A sampler-only graph becomes an engine, with plugin and function."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support.samples import sampled
from topw_deploy.export.sampler_only import export_sampler
from topw_deploy.sampling.parameters import TopWOptions

from .conftest import Ask, assert_built

pytestmark = pytest.mark.long

VOCAB, HIDDEN = 8192, 32  # enough complete blocks for the branch that does not copy logits
BATCHES = [[1, 1], [8, 8], [1, 16]]
VARIANTS: dict[str, dict[str, Any]] = {
    "branches": {},
    "no-branches": {"branches": False},
    "uniform": {"metric": "uniform"},
    "no-branches-uniform": {"branches": False, "metric": "uniform"},
    "all-outputs": {"with_mass": True, "with_keep_mask": True},
    "mask-alone": {"branches": False, "with_keep_mask": True, "metric": "cosine", "alt_iters": 9},
    "k-nearest": {"metric": "unit", "potential": "knn", "knn_k": 4},
    "bounds": {"neighbour_bound": True, "top_m": 200},
}


LONG = ("branches", "no-branches", "mask-alone", "k-nearest", "bounds")
"""The others are broad."""
INLINED = ("mask-alone", "k-nearest", "bounds")
"""Of these, those that are also built without a plugin."""


@pytest.fixture(scope="session")
def samplers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("samplers")
    table = folder / "table.npy"
    np.save(table, np.random.default_rng(0).standard_normal((VOCAB, HIDDEN)).astype(np.float32))
    names = list(VARIANTS if request.config.option.broad else LONG)
    for name in names:
        settings = VARIANTS[name]
        uniform = settings.get("options", TopWOptions()).metric == "uniform"
        source = {"vocab_size": VOCAB} if uniform else {"embeddings": table}
        export_sampler(None, folder / name, verify=False, **source, **settings)
    return {name: folder / name / "model.onnx" for name in names}


@pytest.fixture(scope="session")
def inlined(nvidia: Ask, samplers: dict[str, Path], request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = VARIANTS if request.config.option.broad else INLINED
    tasks = [{"model": str(samplers[name]), "batches": BATCHES} for name in names]
    return dict(zip(names, nvidia(tasks), strict=True))


@pytest.fixture(scope="session")
def plugged(nvidia: Ask, samplers: dict[str, Path]) -> dict[str, dict[str, Any]]:
    tasks = [{"model": str(path), "batches": BATCHES} for path in samplers.values()]
    return dict(zip(samplers, nvidia(tasks, with_plugin=True), strict=True))


@pytest.mark.parametrize("name", sampled(VARIANTS, INLINED, ()))
def test_without_a_plugin_the_function_is_inlined_and_an_engine_built(
    inlined: dict[str, dict[str, Any]], name: str
) -> None:
    assert_built(inlined[name], plugins=0)
    assert inlined[name]["layers"] > 300


@pytest.mark.parametrize("name", sampled(VARIANTS, LONG, ()))
def test_with_the_plugin_the_node_is_one_layer_of_the_engine(plugged: dict[str, dict[str, Any]], name: str) -> None:
    assert_built(plugged[name], plugins=1)
    assert plugged[name]["layers"] <= 1 + 4  # table, statistics and bounds: constants


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_the_plugin_takes_logits_in_half_precision_where_a_graph_hands_it_some(
    nvidia: Ask, samplers: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    model = onnx.load(samplers["branches"])
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DataType.Value(dtype)
    onnx.save(model, tmp_path / "model.onnx")
    (answer,) = nvidia([{"model": str(tmp_path / "model.onnx"), "batches": BATCHES}], with_plugin=True)
    assert_built(answer, plugins=1)


def test_the_plugin_refuses_what_the_kernels_cannot_serve_before_there_is_an_engine(
    nvidia: Ask, tmp_path: Path
) -> None:
    options = TopWOptions(metric="uniform", top_m=5000)
    export_sampler(None, tmp_path / "out", vocab_size=VOCAB, **asdict(options), verify=False)
    (answer,) = nvidia([{"model": str(tmp_path / "out" / "model.onnx"), "batches": [[1, 1]]}], with_plugin=True)
    assert answer["parsed"]
    assert answer["bytes"] == [0]


def test_the_check_says_whether_the_plugin_serves_the_node(nvidia: Ask, tmp_path: Path) -> None:
    options = TopWOptions(metric="uniform", top_m=64)
    export_sampler(None, tmp_path / "out", vocab_size=VOCAB, **asdict(options), verify=False)
    task = [{"check": str(tmp_path / "out")}]
    (without,), (plugged,) = nvidia(task), nvidia(task, with_plugin=True)
    assert (without["takes"], plugged["takes"], plugged["why_no_plugin"]) == (True, True, "")
    assert without["why_no_plugin"].startswith("it was not built here")

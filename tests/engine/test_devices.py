"""Engines on devices draw what the host draws. Device memory and CUDA graphs are doubles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import FORMS, SYSTEM, NewEngine, ask
from tests.engine.test_results import random_request
from tests.runtime.ort.test_device_binding import Open, on_a_device  # noqa: F401  # a fixture
from tests.support.samples import slow
from tests.support.tensorrt_double import gpu, no_plugin, trt  # noqa: F401  # fixtures
from tests.support.toy_model import Toy, export
from tests.tensorrt.conftest import CACHE, out  # noqa: F401  # a fixture
from tests.tensorrt.run.conftest import Open as OpenEngine
from tests.tensorrt.run.conftest import on_cpu, opened  # noqa: F401  # fixtures
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions


@pytest.fixture(scope="session")
def exported_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder for --target tensorrt with all sampling rules, because the random requests use them."""
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))
    settings: dict[str, Any] = {"form": "scatter", "max_length": CACHE, "with_mass": True}
    return export(tmp_path_factory.mktemp("toy") / "out", toy, **settings)


@pytest.fixture(params=["grouped", "growing"])
def folder(request: pytest.FixtureRequest, toy: Toy, tmp_path: Path) -> Path:
    return export(tmp_path / "out", toy, **FORMS[request.param])  # type: ignore[arg-type]


@pytest.fixture
def host(folder: Path) -> TopWModel:
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1)


@pytest.mark.parametrize("graphs", [slow(False), True], ids=["", "graphs"])
def test_a_device_draws_what_the_host_draws(
    folder: Path,
    host: TopWModel,
    on_a_device: Open,  # noqa: F811
    engine_of: NewEngine,
    graphs: bool,
) -> None:
    """Steps of several widths and chunks use the same device memory in turn."""
    model, session = on_a_device(folder, graphs=graphs)
    engine = engine_of(model, max_batch=3, prefill_budget=7)
    rng = np.random.default_rng(3)
    given: list[dict[str, Any]] = [random_request(rng) for _ in range(16)]
    requests = [engine.submit(**one) for one in given]
    for one, request in zip(given, requests, strict=True):
        assert request.result(60) == host.generate(**one)
    assert bool(session.replays) == graphs


def test_a_session_of_a_device_is_loaded_into_a_row(
    folder: Path,
    host: TopWModel,
    tmp_path: Path,
    on_a_device: Open,  # noqa: F811
    engine_of: NewEngine,
) -> None:
    """Engines on devices store nothing in host memory."""
    model, _ = on_a_device(folder, graphs=False)
    engine, other = engine_of(model, max_batch=2), engine_of(model, max_batch=2, prefix_bytes=10**6)
    ask(engine, SYSTEM)
    assert engine.save_session([*SYSTEM, 1], tmp_path / "session").tokens == 30
    other.load_session(tmp_path / "session")
    found = ask(other, [*SYSTEM, 77, 78])
    assert (found, found.cached_tokens) == (ask(host, [*SYSTEM, 77, 78]), 30)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["both", "decode"])
def test_a_tensorrt_engine_draws_what_onnxruntime_draws(
    opened: OpenEngine,  # noqa: F811
    on_cpu: TopWModel,  # noqa: F811
    engine_of: NewEngine,
    profile: str,
) -> None:
    """An engine of the profile `decode` reads prompts token by token."""
    engine = engine_of(opened(profile=profile), max_batch=4, max_length=96)
    rng = np.random.default_rng(3)
    given = [random_request(rng) for _ in range(16)]
    requests = [engine.submit(**one) for one in given]
    for one, request in zip(given, requests, strict=True):
        found, alone = request.result(60), on_cpu.generate(**one)
        pairs = zip(found, alone, strict=True) if isinstance(found, list) else [(found, alone)]
        for result, whole in pairs:
            assert (result.token_ids, result.logprobs) == (whole.token_ids, whole.logprobs)

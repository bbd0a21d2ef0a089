"""The options of an engine, and the models that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import NewEngine
from tests.support.tensorrt_double import gpu, no_plugin, trt  # noqa: F401  # fixtures
from tests.support.toy_model import CONTEXT, Toy, export
from tests.tensorrt.conftest import exported_toy, out  # noqa: F401  # fixtures
from tests.tensorrt.run.conftest import Open, opened  # noqa: F401  # fixtures
from topw_deploy.engine import Engine
from topw_deploy.errors import GenerationError, ParameterError
from topw_deploy.runtime import TopWModel


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0, but must be an integer >= 1"),
        ({"max_batch": True}, "max_batch is True"),
        ({"max_batch": 2.0}, r"max_batch is 2\.0, but must be an integer >= 1"),
        ({"max_batch": 10**6}, "max_batch is 1000000, but an engine has at most 1024 slots; give at most that"),
        ({"max_batch": 10**6, "kv_bytes": 10**8}, "max_batch is 1000000, but an engine has at most 1024 slots"),
        ({"max_length": CONTEXT + 1}, f"max_length is {CONTEXT + 1}, but the model's context holds {CONTEXT}"),
        ({"max_queue": -1}, "max_queue is -1, but must be an integer >= 0"),
        ({"prefill_budget": 0}, "prefill_budget is 0"),
        ({"kv_bytes": 100}, "kv_bytes is 100 bytes, but a slot of 96 tokens takes 18.4 kB; give more"),
        ({"prefix_bytes": -1}, "prefix_bytes is -1, but must be an integer >= 0"),
        ({"reuse_prefixes": None}, "reuse_prefixes is None, but must be True or False"),
        ({"exact": 1}, "exact is 1, but must be True or False"),
        ({"when_full": "drop"}, "when_full is 'drop', but must be one of error, wait"),
    ],
)
def test_options_out_of_range_are_refused(model: TopWModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Engine(model, **options)


@pytest.mark.parametrize(("form", "advice"), [("concat", "without --kv concat"), ("shared", "the original checkpoint")])
def test_only_static_caches_are_accepted(toy: Toy, tmp_path: Path, form: str, advice: str) -> None:
    model = TopWModel.from_pretrained(export(tmp_path / "out", toy, form=form), provider="cpu")
    with pytest.raises(ParameterError, match=f"a static cache, but .* is {form}; export .*{advice}"):
        Engine(model)


def test_a_tensorrt_engine_of_fewer_rows_is_refused(opened: Open) -> None:  # noqa: F811
    with pytest.raises(
        ParameterError, match="max_batch is 8, but the TensorRT engine was built for 4; give at most that"
    ):
        Engine(opened())


def test_rows_that_tensorrt_cannot_bind_are_refused(model: TopWModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model._session, "provider", "tensorrt", raising=False)
    with pytest.raises(ParameterError, match="a slot of a state takes 992 bytes, which is not a multiple of 256"):
        Engine(model, max_length=31)
    Engine(model, max_length=32).shutdown()


def test_a_closed_model_is_refused(load: Any) -> None:
    model = load(Toy.random(0))
    model.close()
    with pytest.raises(GenerationError, match="the model is closed"):
        Engine(model)


def test_the_cache_takes_the_bytes_of_its_rows(model: TopWModel, engine_of: NewEngine) -> None:
    """A token of the toy has 2 x (8 + 16) floats."""
    row = 2 * (8 + 16) * 4 * 32
    assert engine_of(model, max_batch=3, max_length=32).stats().cache_bytes == 3 * row
    limited = engine_of(model, max_batch=10**6, max_length=32, kv_bytes=5 * row + 1)
    assert (limited.stats().slots, limited.stats().cache_bytes) == (5, 5 * row)

"""With `exact`, reuse changes no bit, although kernels such as float32 attention round by the shape of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import HOT, ask
from tests.support.tiny_models import VOCAB, export, make_model, write_tokenizer
from topw_deploy.engine import Engine
from topw_deploy.runtime import GenerationResult, TopWModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TopWModel]:
    """Opens a model that was exported with the given options."""
    folder = tmp_path_factory.mktemp("exact")
    make_model("llama_untied").save_pretrained(folder / "model")
    write_tokenizer(folder / "model")

    def open_model(*, sampler: str = "auto", **options: Any) -> TopWModel:
        output = folder / "-".join(["out", *map(str, options.values())])
        if not output.exists():
            export(folder / "model", output, **options)
        return TopWModel.from_pretrained(output, provider="cpu", intra_op_num_threads=1, sampler=sampler)

    return open_model


@pytest.fixture(scope="module")
def model(exported: Callable[..., TopWModel]) -> TopWModel:
    return exported(dtype="fp32")


def reused_and_fresh(model: TopWModel, *, exact: bool) -> list[tuple[GenerationResult, GenerationResult]]:
    """Results for the second and third turns of chats: of an engine that reuses the previous turn, and of a new one."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(4):
        prompt = rng.integers(3, VOCAB, int(rng.integers(20, 100))).tolist()
        with Engine(model, max_batch=1, prefill_budget=16, exact=exact) as engine:
            for turn in range(3):
                again = ask(engine, prompt, 20)
                with Engine(model, max_batch=1, prefill_budget=16, exact=exact) as fresh:
                    if turn:
                        found.append((again, ask(fresh, prompt, 20)))
                prompt += [*again.token_ids, 5, 6]
    assert all(again.cached_tokens >= 16 > fresh.cached_tokens == 0 for again, fresh in found)
    return found


@pytest.mark.parametrize(("sampler", "exact"), [("graph", True), ("graph", False), ("native", False)])
def test_reuse_draws_the_same_tokens_and_natively_or_with_exact_the_same_bits(
    exported: Callable[..., TopWModel], sampler: str, exact: bool
) -> None:
    """With onnxruntime's attention and without `exact` some bits differ, which shows that the test can fail."""
    found = reused_and_fresh(exported(dtype="fp32", sampler=sampler), exact=exact)
    assert [again.token_ids for again, _ in found] == [fresh.token_ids for _, fresh in found]
    same_bits = all(again.logprobs == fresh.logprobs for again, fresh in found)
    assert same_bits is (exact or sampler == "native")


def together_and_one_by_one(model: TopWModel, **options: Any) -> list[tuple[GenerationResult, GenerationResult]]:
    """Results for prompts that share beginnings: of an engine that runs them together, and of one that runs them one by
    one.
    """
    rng = np.random.default_rng(1)
    beginnings = [rng.integers(3, VOCAB, 60).tolist() for _ in range(3)]
    given: list[dict[str, Any]] = [
        {
            "prompt": [*beginnings[rng.integers(3)][: rng.integers(10, 60)], *rng.integers(3, VOCAB, 4).tolist()],
            "max_new_tokens": int(rng.integers(5, 30)), "seed": seed, **HOT,
        }
        for seed in range(30)
    ]  # fmt: skip
    options = {"max_batch": 4, "prefill_budget": 16, "prefix_bytes": 10**6, **options}
    with Engine(model, **options) as engine:
        requests = [engine.submit(**one) for one in given]
        together = [request.result(60) for request in requests]
        assert engine.stats().cached_tokens > 200
    with Engine(model, **{**options, "reuse_prefixes": False}) as engine:
        return list(zip(together, [engine.submit(**one).result(60) for one in given], strict=True))


@pytest.mark.parametrize(("dtype", "exact"), [("fp32", True), ("int8", True), ("int4", True), ("int4", False)])
def test_exact_results_do_not_depend_on_what_runs_beside_them(
    exported: Callable[..., TopWModel], dtype: str, exact: bool
) -> None:
    """onnxruntime's kernels for 4-bit weights round by the number of rows, which shows that the test can fail."""
    found = together_and_one_by_one(exported(dtype=dtype, sampler="auto" if exact else "graph"), exact=exact)
    assert all((busy.token_ids, busy.logprobs) == (alone.token_ids, alone.logprobs) for busy, alone in found) is exact

"""With `exact`, reuse changes no bit where kernels round by the shape of a run, as float32 attention does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.conftest import HOT
from tests.support.tiny_models import VOCAB, export, make_model, write_tokenizer
from topw_deploy.engine import Engine
from topw_deploy.runtime import GenerationResult, TopWModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    folder = tmp_path_factory.mktemp("exact")
    make_model("llama_untied").save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    export(folder / "model", folder / "out")
    return TopWModel.from_pretrained(folder / "out", provider="cpu", intra_op_num_threads=1)


def ask(engine: Engine, prompt: list[int]) -> GenerationResult:
    return engine.submit(prompt, max_new_tokens=20, seed=1, **HOT).result(60)


def pairs(model: TopWModel, *, exact: bool) -> list[tuple[GenerationResult, GenerationResult]]:
    """Second and third turns of chats, by an engine that reuses the turn before, and by a fresh one."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(4):
        prompt = rng.integers(3, VOCAB, int(rng.integers(20, 100))).tolist()
        with Engine(model, max_batch=1, prefill_budget=16, exact=exact) as engine:
            for turn in range(3):
                again = ask(engine, prompt)
                with Engine(model, max_batch=1, prefill_budget=16, exact=exact) as fresh:
                    if turn:
                        found.append((again, ask(fresh, prompt)))
                prompt += [*again.token_ids, 5, 6]
    assert all(again.cached_tokens >= 16 > fresh.cached_tokens == 0 for again, fresh in found)
    return found


def test_exact_reuse_changes_no_bit(model: TopWModel) -> None:
    for again, fresh in pairs(model, exact=True):
        assert (again.token_ids, again.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_other_reuse_rounds_differently_and_draws_the_same(model: TopWModel) -> None:
    """Otherwise the test above would prove nothing."""
    found = pairs(model, exact=False)
    assert [again.token_ids for again, _ in found] == [fresh.token_ids for _, fresh in found]
    assert any(again.logprobs != fresh.logprobs for again, fresh in found)

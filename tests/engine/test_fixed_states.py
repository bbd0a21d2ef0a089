"""States of fixed size are stored at the ends of chunks, so that prompts with the same beginning reuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import HOT, SYSTEM, NewEngine, ask
from tests.support.hybrid_models import make_hybrid
from tests.support.tiny_models import export, make_model, write_tokenizer
from topw_deploy.engine import Engine
from topw_deploy.engine.prefixes import Snapshots
from topw_deploy.errors import GenerationError
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow

# Convolutions, a window, delta rules (all with attention to all tokens), and no attention at all.
FAMILIES = {"lfm2": {}, "gemma3": {}, "qwen3_next": {}, "mamba2": {"target": "tensorrt", "max_length": 128}}
ALWAYS = ("lfm2",)  # the others in CI


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in FAMILIES],
)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TopWModel:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    source = make_model(family) if family == "gemma3" else make_hybrid(family)
    source.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    export(folder / "model", folder / "out", **FAMILIES[family])
    return TopWModel.from_pretrained(folder / "out", provider="cpu", intra_op_num_threads=1)


@pytest.mark.parametrize(
    ("options", "ends", "cached"),
    [
        ({"prefill_budget": 8, "prefix_bytes": 10**7}, ([60, 61], [70, 71], [80, 81, 82]), [0, 24, 24]),
        # For example, a template leaves the reasoning of an answer out of the next prompt.
        ({"prefill_budget": 64, "prefix_bytes": 10**7}, ([], [77, 78, 79]), [0, 30]),
        ({"prefill_budget": 8}, ([60], [70]), [0, 0]),  # without host memory, only whole sequences are reused
    ],
    ids=["chunks", "another answer", "no host memory"],
)
def test_prompts_with_one_beginning_reuse_what_is_stored(
    hybrid: TopWModel, engine_of: NewEngine, options: dict[str, int], ends: tuple[list[int], ...], cached: list[int]
) -> None:
    engine = engine_of(hybrid, max_batch=2, **options)
    found = [ask(engine, [*SYSTEM, *end]) for end in ends]
    alone = [ask(hybrid, [*SYSTEM, *end]) for end in ends]
    assert [result.token_ids for result in found] == [result.token_ids for result in alone]
    assert [result.cached_tokens for result in found] == cached
    again = ask(engine, [*SYSTEM, *ends[0]], reuse_prefix=False)
    assert (again.cached_tokens, again.token_ids) == (0, alone[0].token_ids)
    turn = [*SYSTEM, *ends[-1], *alone[-1].token_ids, 5]
    assert ask(engine, turn).cached_tokens == len(turn) - 2


def test_a_chunk_ends_where_a_prompt_first_differs_from_another(
    hybrid: TopWModel, engine_of: NewEngine, chunks: list[tuple[int, int]]
) -> None:
    """Then the third prompt reuses all tokens that it shares, although no chunk of the first prompt ended there."""
    engine = engine_of(hybrid, max_batch=2, prefill_budget=64, prefix_bytes=10**7)
    for end in ([60, 61], [70, 71], [80, 81, 82]):
        prompt = [*SYSTEM, *end]
        assert ask(engine, prompt).token_ids == ask(hybrid, prompt).token_ids
    assert chunks == [(0, 32), (0, 30), (30, 32), (30, 33)]


def test_two_chats_that_share_a_row_continue_after_all_that_they_read(hybrid: TopWModel, engine_of: NewEngine) -> None:
    """The second prompt shares 29 tokens with the first."""
    engine = engine_of(hybrid, max_batch=1, prefill_budget=8, prefix_bytes=10**7)
    prompts = [SYSTEM, [*SYSTEM[:-1], 60]]
    for turn in range(3):
        for chat, prompt in enumerate(prompts):
            found = ask(engine, prompt, 6)
            assert found.token_ids == ask(hybrid, prompt, 6).token_ids
            assert found.cached_tokens == (30 + 8 * turn - 3 if turn else 24 * chat)
            prompts[chat] = [*prompt, *found.token_ids, 50, 51]


def test_exact_engines_reuse_whole_chunks_and_change_no_bit(hybrid: TopWModel, engine_of: NewEngine) -> None:
    options: dict[str, Any] = {"max_batch": 1, "prefill_budget": 8, "prefix_bytes": 10**7, "exact": True}
    engine = engine_of(hybrid, **options)
    prompt, cached = SYSTEM, []
    for _ in range(3):
        found, fresh = ask(engine, prompt), ask(engine_of(hybrid, **options), prompt)
        assert (found.token_ids, found.logprobs, fresh.cached_tokens) == (fresh.token_ids, fresh.logprobs, 0)
        cached.append(found.cached_tokens)
        prompt = [*prompt, *found.token_ids, 50, 51, 52]
    assert cached == [0, 24, 32]
    assert ask(engine, [*SYSTEM, 77, 78]).cached_tokens == 24  # not 30, the end of the first prompt


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("prefix_bytes", [0, 10**7], ids=["row", "host memory"])
def test_a_session_contains_states_of_fixed_size(
    hybrid: TopWModel, engine_of: NewEngine, tmp_path: Path, prefix_bytes: int, exact: bool
) -> None:
    options: dict[str, Any] = {"max_batch": 2, "prefill_budget": 8, "exact": exact}
    one = engine_of(hybrid, prefix_bytes=10**7, **options)
    ask(one, SYSTEM)
    tokens = 24 if exact else 30
    assert one.save_session([*SYSTEM, 77], tmp_path / "session").tokens == tokens
    other = engine_of(hybrid, prefix_bytes=prefix_bytes, **options)
    if exact and not prefix_bytes:
        with pytest.raises(GenerationError, match="but prefix_bytes is 0 bytes; create the engine with a higher"):
            other.load_session(tmp_path / "session")
        return
    other.load_session(tmp_path / "session")
    found, fresh = ask(other, [*SYSTEM, 77]), ask(engine_of(hybrid, **options), [*SYSTEM, 77])
    assert (found.token_ids, found.cached_tokens, fresh.cached_tokens) == (fresh.token_ids, tokens, 0)
    assert found.logprobs == fresh.logprobs or not exact


@pytest.mark.parametrize("seed", range(4))
def test_every_request_of_a_random_schedule_draws_what_it_draws_alone(hybrid: TopWModel, seed: int) -> None:
    """Host memory has room for all sequences, or for few."""
    rng = np.random.default_rng(seed)
    options = {"max_batch": 1 + seed % 3, "prefill_budget": 6, "exact": seed == 3}
    beginnings = [[], SYSTEM[:9], SYSTEM, [*SYSTEM, *range(60, 80)], [5] * 12]
    with Engine(hybrid, prefix_bytes=(10**7, 10**7, 40_000, 10**7)[seed], **options) as engine:
        requests = []
        for _ in range(20):
            prompt = [*beginnings[rng.integers(5)], *rng.integers(5, 8, rng.integers(1, 7)).tolist()]
            new = int(rng.integers(1, 9))
            requests.append((prompt, new, engine.submit(prompt, max_new_tokens=new, seed=3, **HOT)))
            if rng.random() < 0.4:
                prompt = [*prompt, *requests[-1][-1].result(60).token_ids, 9]
                requests.append((prompt, new, engine.submit(prompt, max_new_tokens=new, seed=3, **HOT)))
        for prompt, new, request in requests:
            assert request.result(60).token_ids == ask(hybrid, prompt, new).token_ids
        assert engine.stats().cached_tokens > 0
        stored: Snapshots = engine._worker._prefixes._snapshots
        assert stored.bytes <= stored.max_bytes

"""Mixers written with placeholders equal transformers' own."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.hybrid_models import HYBRIDS, make_hybrid
from tests.support.mixers import EagerPlaceholders, StatelessMixersCache
from topw_deploy.export.trace.mixers import marked_mixers, takes_cache

BOUND = 1e-4  # of the largest logit: float32 sums in another order, through two layers
CALLS = (9, 4, 1, 1)  # tokens of a prompt, a chunk and two steps; transformers' chunks are of 4


def logits_by_calls(
    model: PreTrainedModel, ids: torch.Tensor, calls: tuple[int, ...], *, keep_states: bool = True
) -> torch.Tensor:
    """Logits of every token, with the mixers' placeholders as loops."""
    config = model.config.get_text_config(decoder=True)
    cache = StatelessMixersCache(config)
    parameters = inspect.signature(type(model).forward).parameters
    name = "past_key_values" if "past_key_values" in parameters else "cache_params"
    found, start = [], 0
    states: dict[tuple[str, int, int], torch.Tensor] = {}
    for count in calls:
        if not keep_states:
            states.clear()
        with torch.no_grad(), marked_mixers(model, EagerPlaceholders(cache, states)):
            given = {"input_ids": ids[:, start : start + count], "use_cache": takes_cache(model)}
            if takes_cache(model):
                given[name] = cache
            if "position_ids" in parameters:
                given["position_ids"] = torch.arange(start, start + count).expand(ids.shape[0], -1)
            found.append(model(**given).logits)
        start += count
    return torch.cat(found, dim=1)


def sample_ids() -> torch.Tensor:
    return torch.randint(3, 300, (2, sum(CALLS)), generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_marked_mixers_compute_the_models_logits_in_a_prompt_in_chunks_and_in_steps(family: str) -> None:
    model = make_hybrid(family)
    ids = sample_ids()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    found = logits_by_calls(model, ids, CALLS)
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_states_of_mixers_matter_in_these_models(family: str) -> None:
    model = make_hybrid(family)
    ids = sample_ids()
    found, kept = (logits_by_calls(model, ids, (9, 6), keep_states=keep_states) for keep_states in (False, True))
    assert (found - kept)[:, 9:].abs().max() > 100 * BOUND * kept.abs().max()


@pytest.mark.slow
def test_n_grams_do_not_reach_past_an_end_of_text_token() -> None:
    model = make_hybrid("qwen4_exp_text")
    ids = sample_ids()
    ids[0, [0, 3, 8, 13]] = ids[1, [4, 5, 9]] = model.config.eos_token_id
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    assert (logits_by_calls(model, ids, CALLS) - expected).abs().max() <= BOUND * expected.abs().max()

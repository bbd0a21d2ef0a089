"""`generate_until`: parameters of tasks and of --model_args, seeds, stops and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import CONTEXT, EOS, Toy, byte_ids, export
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import TopWModel

from .conftest import TEMPLATE, Open, instances

TASK = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 9}
PROMPTS = [f"{'x' * (i % 7)}prompt {i}" for i in range(40)]


def generate(model: Any, *pairs: Any) -> list[str]:
    found: list[str] = model.generate_until(instances("generate_until", list(pairs)), disable_tqdm=True)
    return found


@pytest.mark.parametrize("form", ["grouped", "concat"])
def test_greedy_answers_are_the_models_in_the_order_of_the_requests(
    opened: Open, toy: Toy, tmp_path: Path, form: str
) -> None:
    folder = export(tmp_path / "out", toy, form=form)
    plain = TopWModel.from_pretrained(folder, provider="cpu")
    model = opened(folder, batch_size=3)
    assert (model._runner.engine is None) == (form == "concat"), "its cache has no rows"
    found = generate(model, *((prompt, TASK) for prompt in PROMPTS))
    assert found == [plain.generate(p, temperature=0, max_new_tokens=9, stop=["\n\n"]).text for p in PROMPTS]
    assert len(set(found)) > 20


def test_model_args_override_the_task(opened: Open, scoring: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = TopWModel.from_pretrained(scoring, provider="cpu")
    model = opened(temperature=2.5, lam=0.2, seed=5)
    from topw_lab.harness import Seeds

    found = generate(model, *((prompt, {**TASK, "temperature": 0.0, "lam": 2.0}) for prompt in PROMPTS[:5]))
    seeds = Seeds(5)
    given = {"temperature": 2.5, "lam": 0.2, "max_new_tokens": 9, "stop": ["\n\n"]}
    assert found == [plain.generate(prompt, **given, seed=seeds.next(prompt)).text for prompt in PROMPTS[:5]]
    assert "--model_args overrides {'do_sample': False, 'temperature': 0.0} of the task." in caplog.text


def test_draws_depend_only_on_seed_prompt_and_repetition(opened: Open) -> None:
    model = opened(temperature=3.0, lam=0.1, seed=1)
    one, other, again = generate(model, ("abc", TASK), ("abd", TASK), ("abc", TASK))
    assert len({one, other, again}) == 3
    assert generate(model, ("abd", TASK), ("abc", TASK), ("abc", TASK)) == [other, one, again]
    assert generate(opened(temperature=3.0, lam=0.1, seed=2), ("abc", TASK)) != [one]


def test_the_run_s_seed_is_the_harness_s(opened: Open) -> None:
    import numpy as np

    seeds = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        seeds.append(opened().get_model_info()["topw_seed"])
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("until", ["c", ["</s>", "c"], ["", "c", "zz"]])
def test_answers_end_before_a_stop_and_at_special_tokens(opened: Open, tmp_path: Path, until: Any) -> None:
    script = Toy.script([*byte_ids("ab"), EOS, *byte_ids("dcb")], prompt_tokens=2)
    folder = export(tmp_path / "out", script, form="grouped", generation_config={"eos_token_id": byte_ids("z")[0]})
    (found,) = generate(opened(folder), ("pq", {"until": until, "max_gen_toks": 9}))
    assert found == ("ab" if "</s>" in until else "abd")


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_the_length_has_the_harness_s_names(opened: Open, tmp_path: Path, name: str) -> None:
    folder = export(tmp_path / "out", Toy.script(byte_ids("abcdefgh"), prompt_tokens=2), form="grouped")
    assert generate(opened(folder, max_gen_toks=5), ("pq", {name: 3}), ("pq", {})) == ["abc", "abcde"]


def test_a_long_prompt_loses_its_beginning_to_leave_room(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = opened(), "abcdefg" * CONTEXT
    kept = prompt[-(CONTEXT - 9) :]
    assert generate(model, (prompt, TASK)) == generate(model, (kept, TASK))
    assert f"prompts of more than {CONTEXT - 9} tokens lose their beginning" in caplog.text
    with pytest.raises(
        ParameterError, match=f"max_gen_toks is {CONTEXT}, but prompt and answer may have {CONTEXT} tokens together"
    ):
        generate(model, ("ab", {"max_gen_toks": CONTEXT}))


def test_text_up_to_the_end_of_thinking_is_removed(opened: Open, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.script([*byte_ids("hm|> 42"), EOS], prompt_tokens=2), form="grouped")
    assert generate(opened(folder), ("pq", TASK)) == ["hm|> 42"]
    assert generate(opened(folder, think_end_token="|>"), ("pq", TASK)) == ["42"]


def test_chats_are_rendered_with_the_folder_s_template(opened: Open, tmp_path: Path) -> None:
    model = opened()
    history = [{"role": "user", "content": "2+2?"}]
    assert model.apply_chat_template(history) == "[u]2+2?;[a]"
    begun = [{"role": "user", "content": "It is what?"}, {"role": "assistant", "content": "It is "}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == "[u]It is what?;[a]It is "
    assert model.chat_template(True) == TEMPLATE
    assert model.chat_template(False) is None
    assert model.tokenizer_name.startswith("out-")
    with pytest.raises(ParameterError, match="names the template 'tool_use'"):
        model.chat_template("tool_use")
    folder = export(tmp_path / "out", Toy.random(1), form="grouped", chat_template="{{ enable_thinking }}{{ x }}")
    given = opened(folder, enable_thinking=False, chat_template_args='{"x": 3}')
    assert given.apply_chat_template(history) == "False3"
    with pytest.raises(PromptError, match="does not contain the beginning of the answer, 'It is'"):
        given.apply_chat_template(begun, add_generation_prompt=False)


def test_answers_are_kept_in_the_harness_s_cache(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.model import CachingLM

    model = CachingLM(opened(temperature=3.0, lam=0.1), str(tmp_path / "cache.db"))
    requests = instances("generate_until", [(prompt, {"until": [], "max_gen_toks": 5}) for prompt in PROMPTS[:3]])
    first = model.generate_until(requests)
    pair = instances("loglikelihood", [("ab", "cd")])
    score = model.loglikelihood(pair)
    monkeypatch.setattr(model.lm, "_runner", None)  # nothing can run
    assert model.generate_until(requests) == first
    assert model.loglikelihood(pair) == score


def test_an_error_of_a_request_ends_the_run_and_cancels_the_others(opened: Open) -> None:
    model = opened(batch_size=2, ignore_eos=True)
    long = {"max_gen_toks": 80}
    with pytest.raises(ParameterError):
        generate(model, *[(prompt, long) for prompt in PROMPTS[:15]], ("ab", {**long, "lam": -1}))
    assert generate(model, ("ab", TASK))
    assert model._runner.engine.stats().new_tokens < 10 * 80

"""Streamers and stopping criteria."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.toy_model import CONTEXT, EOS, Load, Toy, byte_ids
from topw_deploy.errors import GenerationError, ParameterError, PromptError, TokenizerError
from topw_deploy.runtime import TopWModel

SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "temperature": 3.0, "lam": 0.1, "seed": 5, "ignore_eos": True}


class Notes:
    """A streamer that records its calls and raises at put number `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[Any] = []
        self.fails_at = fails_at

    def put(self, value: np.ndarray) -> None:
        assert value.dtype == np.int64
        if len(self.calls) == self.fails_at:
            raise OSError("the pipe is broken")
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def test_a_streamer_gets_the_prompt_then_each_token_then_the_end(model: TopWModel) -> None:
    notes = Notes()
    result = model.generate("ab", streamer=notes, **SETTINGS)
    assert notes.calls == [[byte_ids("ab")], *([token] for token in result.token_ids), "end"]
    again = Notes()
    pieces = list(model.stream("ab", streamer=again, **SETTINGS))
    assert pieces[-1].result == result
    assert again.calls == notes.calls


def test_a_streamer_sees_the_end_of_sequence_and_the_tokens_of_a_stop_string(load: Load) -> None:
    tokens = [*byte_ids("ok<"), EOS]
    model = load(Toy.script(tokens, prompt_tokens=1))
    for given, seen in (({}, tokens), ({"stop": "<"}, tokens[:3])):
        notes = Notes()
        model.generate("x", streamer=notes, **given)
        assert notes.calls[1:-1] == [[token] for token in seen]


def test_a_streamer_follows_one_sequence(model: TopWModel) -> None:
    for prompt, given in ((["a", "b"], {}), ("a", {"n": 2})):
        with pytest.raises(ParameterError, match="a streamer follows one sequence, but the request has 2"):
            model.generate(prompt, streamer=Notes(), **given)
    notes = Notes()
    model.generate(["a"], streamer=notes, **SETTINGS)
    assert notes.calls[-1] == "end"


@pytest.mark.parametrize("streamer", [print, "stdout", object(), Notes], ids=["print", "text", "object", "class"])
def test_an_object_that_is_not_a_streamer_is_refused(model: TopWModel, streamer: Any) -> None:
    with pytest.raises(ParameterError, match=r"streamer is .* but must be an object with methods put and end"):
        model.generate("a", streamer=streamer)


def test_a_streamers_own_error_comes_out_and_the_cache_is_free_again(load: Load) -> None:
    model = load(Toy.random(0), form="grouped")
    expected = model.generate("ab", **SETTINGS)
    lent = model.cache_bytes
    for fails_at in (0, 1, 3):
        notes = Notes(fails_at)
        with pytest.raises(OSError, match="the pipe is broken"):
            model.generate("ab", streamer=notes, **SETTINGS)
        assert notes.calls[-1] == "end"
        assert len(notes.calls) == fails_at + 1
        assert model.generate("ab", **SETTINGS) == expected
    assert model.cache_bytes == lent


def failing(load: Load) -> Iterator[tuple[TopWModel, Callable[..., Any], type[Exception]]]:
    toy = Toy.random(0)
    toy.place[3] = np.nan
    model = load(toy)
    yield model, lambda **k: model.generate("ab", max_new_tokens=9, ignore_eos=True, **k), GenerationError
    yield model, lambda **k: model.generate("a", lamda=1, **k), ParameterError
    yield model, lambda **k: model.generate([-1], **k), PromptError
    yield model, lambda **k: model.stream([-1], **k), PromptError
    yield model, lambda **k: model.chat([{"role": "user", "content": "a"}], **k), TokenizerError
    yield model, lambda **k: model.generate(["a", "b"], **k), ParameterError
    yield model, lambda **k: model.generate("a", stopping_criteria=lambda ids: 1 / 0, **k), ZeroDivisionError
    closed = load(toy)
    closed.close()
    yield closed, lambda **k: closed.generate("a", **k), GenerationError


def test_the_end_is_called_once_whatever_fails(load: Load) -> None:
    for _, call, kind in failing(load):
        notes = Notes()
        with pytest.raises(kind):
            call(streamer=notes)
        assert notes.calls.count("end") == 1
        assert notes.calls[-1] == "end"


def test_end_is_called_if_a_stream_is_closed_early_and_if_the_prompt_fills_the_context(model: TopWModel) -> None:
    notes = Notes()
    pieces = model.stream("ab", streamer=notes, **SETTINGS)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert notes.calls[-1] == "end"
    full = Notes()
    model.generate([5] * CONTEXT, streamer=full)
    assert full.calls == [[[5] * CONTEXT], "end"]


@pytest.fixture(scope="module")
def tokenizer(toy_folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(toy_folder / "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )


ANSWER = "hello 😀 wide world"


def test_transformers_text_streamer_prints_the_text(
    load: Load, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import TextStreamer

    model = load(Toy.script([*byte_ids(ANSWER), EOS], prompt_tokens=1))
    model.generate("x", streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert capsys.readouterr().out == ANSWER + "\n"
    model.generate(["x"], streamer=TextStreamer(tokenizer, skip_special_tokens=True))
    assert capsys.readouterr().out == "x" + ANSWER + "\n"


def third(ids: np.ndarray) -> bool:
    return len(ids) == 5


def test_a_criterion_ends_a_sequence_and_the_result_names_it(model: TopWModel) -> None:
    expected = model.generate("ab", **SETTINGS)
    result = model.generate("ab", stopping_criteria=third, **SETTINGS)
    assert (result.finish_reason, result.stop) == ("criterion", "third")
    assert result.token_ids == expected.token_ids[:3]
    assert result.text == model.tokenizer.decode(result.token_ids)
    assert json.loads(json.dumps(result.as_dict()))["stop"] == "third"
    pieces = list(model.stream("ab", stopping_criteria=[lambda ids: False, third], **SETTINGS))
    assert pieces[-1].result == result
    assert "".join(p.text for p in pieces) == result.text


def test_a_criterion_is_called_with_the_ids_so_far(model: TopWModel) -> None:
    seen = []

    def note(ids: np.ndarray) -> bool:
        assert ids.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 7
        seen.append(ids.tolist())
        return False

    result = model.generate("ab", stopping_criteria=note, **SETTINGS)
    tokens = byte_ids("ab") + result.token_ids
    assert seen == [tokens[: 3 + step] for step in range(6)]
    assert (result.finish_reason, result.stop) == ("length", None)


def test_each_row_of_a_batch_and_each_sample_ends_by_itself(model: TopWModel) -> None:
    results = model.generate(["ab", "abcd", "abcdef"], stopping_criteria=third, **SETTINGS)
    assert [(len(r.token_ids), r.finish_reason) for r in results] == [(3, "criterion"), (1, "criterion"), (6, "length")]
    expected = model.generate(["ab", "abcd", "abcdef"], **SETTINGS)
    for found, whole in zip(results, expected, strict=True):
        assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    samples = model.generate("ab", stopping_criteria=third, n=3, **SETTINGS)
    assert [len(r.token_ids) for r in samples] == [3, 3, 3]


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        (5, "stopping_criteria has 5, but must be a function of the token ids"),
        (Notes, "stopping_criteria has <class .*, but must be a function of the token ids"),
        (lambda ids: None, "stopping_criteria: <lambda> returned a NoneType, but must return True or False"),
        (lambda ids: ids > 3, "returned a ndarray, but must return True or False for its one sequence"),
    ],
)
def test_criteria_that_cannot_decide_are_refused(model: TopWModel, criteria: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        model.generate("ab", stopping_criteria=criteria, **SETTINGS)


def test_criteria_of_transformers_work_unchanged(load: Load, tokenizer: Any) -> None:
    torch = pytest.importorskip("torch")
    from transformers import (
        EosTokenCriteria,
        MaxLengthCriteria,
        MaxTimeCriteria,
        StoppingCriteria,
        StoppingCriteriaList,
        StopStringCriteria,
    )

    class StopOnTokens(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
            assert scores is None
            return bool(torch.all(input_ids[0, -2:] == torch.tensor(byte_ids("lo"))).item())

    model = load(Toy.script([*byte_ids("hello world"), EOS], prompt_tokens=1))
    cases = [
        (MaxLengthCriteria(4), "hel", "MaxLengthCriteria"),
        (StoppingCriteriaList([MaxTimeCriteria(0.0, initial_timestamp=0.0)]), "h", "MaxTimeCriteria"),
        (EosTokenCriteria(byte_ids("o")), "hello", "EosTokenCriteria"),
        ([StopStringCriteria(tokenizer, "o w"), MaxLengthCriteria(50)], "hello w", "StopStringCriteria"),
        (StopOnTokens(), "hello", "StopOnTokens"),
    ]
    for criteria, text, name in cases:
        result = model.generate("x", stopping_criteria=criteria)
        assert (result.text, result.finish_reason, result.stop) == (text, "criterion", name)
    both = model.generate(["x", "y"], stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(4)]))
    assert [r.text for r in both] == ["hel", "hel"]

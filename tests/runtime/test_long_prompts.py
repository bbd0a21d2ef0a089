"""Prompts that are certainly too long are refused before they are tokenized or read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.toy_model import CONTEXT, Load, Toy, byte_ids
from topw_deploy.errors import PromptError
from topw_deploy.runtime import TopWModel


@pytest.fixture
def untokenised(load: Load, monkeypatch: pytest.MonkeyPatch) -> TopWModel:
    """A model whose tokenizer must not be called."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = load(Toy.random(0), chat_template=template)

    def refuse(*given: Any) -> list[int]:
        raise AssertionError("tokenised before its length was checked")

    monkeypatch.setattr(model.tokenizer, "encode", refuse)
    return model


def test_a_long_text_is_refused_before_it_is_tokenised(untokenised: TopWModel) -> None:
    long = "word " * 10**5
    message = f"has 500,000 characters, more than 256 per token, the model's context holds {CONTEXT}; shorten it"
    for call in (untokenised.generate, untokenised.stream):
        with pytest.raises(PromptError, match="the prompt " + message):
            call(long)
        with pytest.raises(PromptError, match="prompt 0 " + message):
            call([long, "short"])
    for chat in (untokenised.chat, untokenised.stream_chat):
        with pytest.raises(PromptError, match="the prompt " + message):
            chat([{"role": "user", "content": long}])


def test_a_prompt_that_fills_the_context_is_never_refused(load: Load) -> None:
    model = load(Toy.random(0))
    for text in ("a" * CONTEXT, " " * CONTEXT, "é" * (CONTEXT // 2)):
        assert model.generate(text).prompt_tokens == CONTEXT
    short = TopWModel.from_pretrained(model.path, provider="cpu", max_length=16)
    with pytest.raises(PromptError, match="opened with max_length 16; shorten it, or open the model with more"):
        short.generate(byte_ids("a" * 17))
    with pytest.raises(PromptError, match=r"has 10,000 characters.*opened with max_length 16"):
        short.generate("a" * 10_000)

"""The bundled model: real logits, tokenizer and embedding geometry."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow

PROMPTS = ["def parse(", "The", "import os\n\nclass Reader(Base):\n    def __init__(self, path):\n", "Return a list"]


@pytest.fixture(scope="module")
def demo(demo_export: Path) -> TopWModel:
    return TopWModel.from_pretrained(demo_export, provider="cpu", intra_op_num_threads=1)


def test_the_defaults_are_certified_and_hot_sampling_is_not(demo: TopWModel) -> None:
    """The README's statement about defaults, and that geometry has an effect."""
    assert demo.generate("def parse(", seed=1, max_new_tokens=60, ignore_eos=True).certified_share == 1.0
    hot = demo.generate("def parse(", seed=1, max_new_tokens=6, ignore_eos=True, temperature=2.0, lam=0.2)
    assert hot.certified_share < 1.0


def test_any_tokens_of_a_real_vocabulary_come_out_as_their_text(demo: TopWModel) -> None:
    size = demo.tokenizer.vocab_size

    @given(tokens=st.lists(st.integers(3, size - 1), max_size=25), prompt=st.sampled_from(["", *PROMPTS, "é😀"]))
    def check(tokens: list[int], prompt: str) -> None:
        before = demo.tokenizer.encode(prompt)
        decoder = demo.tokenizer.text_decoder(before)
        text = "".join([*map(decoder.push, tokens), decoder.flush()])
        assert demo.tokenizer.decode([*before, *tokens]) == demo.tokenizer.decode(before) + text

    check()

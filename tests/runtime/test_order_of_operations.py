"""The order of operations of docs/guide/runtime.md, as tables to check with a pencil.

Eight tokens: <s>, </s>, <pad>, A to E. Logits are whole numbers of bits, so a weight is a power of 2: a bias of one bit
doubles it, and a penalty of 2 takes its root if it is above 1, otherwise its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.support.toy_model import CONTEXT, FEATURES, Toy, export
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions

BIT = math.log(2)
NEVER = -1000  # bits
_, END, _, A, B, C, D, E = range(8)
NAMES = ["<s>", "</s>", "<pad>", *"ABCDE"]
WHOLE_POOL: dict[str, Any] = {"lam": 0.0, "beta": 50.0, "init_top_p": 1.0}
HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)

DICE = {A: 3, B: 2, C: 1, D: 0, E: -1}
"""Bits of the next token, whatever came before: weights 8, 4, 2, 1, 1/2."""
SCORES = {A: Fraction(16, 31), B: Fraction(8, 31), C: Fraction(4, 31), D: Fraction(2, 31), E: Fraction(1, 31)}
"""Their shares: what `logprobs` gives, whatever the request changes."""

# (prompt, tokens of the pool, parameters in bits) -> weights of the tokens that can be drawn
STEPS: dict[str, tuple[str, int, dict[str, Any], dict[int, Any]]] = {
    "nothing": ("A", 8, {}, {A: 8, B: 4, C: 2, D: 1, E: HALF}),
    "1. the penalty divides 2 bits and multiplies -1": (
        "BE", 8, {"repetition_penalty": 2.0}, {A: 8, B: 2, C: 2, D: 1, E: QUARTER},
    ),
    "2. after it, the bias: 2 / 2 + 2 = 3 bits": (
        "B", 8, {"repetition_penalty": 2.0, "logit_bias": {B: 2}}, {A: 8, B: 8, C: 2, D: 1, E: HALF},
    ),
    "3. bans, whatever the bias": (
        "A", 8, {"logit_bias": {A: 9}, "suppress_tokens": [A]}, {B: 4, C: 2, D: 1, E: HALF},
    ),
    "3. of the token that completes a word; C B is not begun": (
        "AB", 8, {"bad_words_ids": [[B, A], [C, B]]}, {B: 4, C: 2, D: 1, E: HALF},
    ),
    "3. of what followed the last token before: B and A": (
        "BBAB", 8, {"no_repeat_ngram_size": 2}, {C: 2, D: 1, E: HALF},
    ),
    "4. only allowed tokens, whatever the bias": (
        "A", 8, {"logit_bias": {A: 9, D: 2}, "allowed_token_ids": [B, D]}, {B: 4, D: 4},
    ),
    "4. that are not banned": ("A", 8, {"allowed_token_ids": [A, B, D], "suppress_tokens": [A]}, {B: 4, D: 1}),
    "5. the pool, of tokens that are not banned": ("A", 3, {"suppress_tokens": [A]}, {B: 4, C: 2, D: 1}),
    "5. the pool, of allowed tokens": ("A", 3, {"allowed_token_ids": [A, C, D, E]}, {A: 8, C: 2, D: 1}),
    "5. the pool, by biased logits: -1 + 5 = 4 bits": ("A", 3, {"logit_bias": {E: 5}}, {E: 16, A: 8, B: 4}),
    # With B and C left, p is 2/3 and 1/3: J = 2 ln 2/3 = -0.81 for B, 2/3 ln 2/3 + 1/3 ln 1/3 = -0.64 for both.
    "5. the crop at selection_temperature 1, 6. the draw at 1/2 from 4^2 and 2^2": (
        "A", 8,
        {"lam": 1.0, "beta": 2.0, "temperature": 0.5, "selection_temperature": 1.0, "suppress_tokens": [A, D, E]},
        {B: 16, C: 4},
    ),
    # At temperature 1/2, p is 4/5 and 1/5: J = 2 ln 4/5 = -0.45 for B, 4/5 ln 4/5 + 1/5 ln 1/5 = -0.50 for both.
    "5. the crop at temperature 1/2, without a selection_temperature": (
        "A", 8, {"lam": 1.0, "beta": 2.0, "temperature": 0.5, "suppress_tokens": [A, D, E]}, {B: 1},
    ),
    "6. temperature 0 takes the largest edited logit": ("A", 8, {"temperature": 0.0, "logit_bias": {C: 3}}, {C: 1}),
}  # fmt: skip

# Where transformers' processors, in their order, give other weights.
THEIRS: dict[str, dict[int, Any]] = {
    "2. after it, the bias: 2 / 2 + 2 = 3 bits": {A: 8, B: 4, C: 2, D: 1, E: HALF},  # (2 + 2) / 2 = 2 bits
}

CHAIN = {A: B, B: C, C: D, D: E, E: END, END: A}
"""The next token has 3 bits, A has 2 elsewhere."""


def ended(name: str) -> Callable[[np.ndarray], bool]:
    """A criterion that ends a sequence once its third token is drawn."""

    def third(ids: np.ndarray) -> bool:
        return len(ids) == 4

    third.__name__ = name
    return third


# parameters -> tokens, text, finish_reason, stop; greedy, from the prompt "A"
SEQUENCES: dict[str, tuple[dict[str, Any], list[int], str, str, Any]] = {
    "nothing": ({}, [B, C, D, E, END], "BCDE", "stop", END),
    "an id ends the sequence": ({"stop_token_ids": [D]}, [B, C, D], "BC", "stop", D),
    "a text does, and is cut off": ({"stop": "CD"}, [B, C, D], "B", "stop", "CD"),
    "an id before a text": ({"stop_token_ids": [C], "stop": "C"}, [B, C], "B", "stop", C),
    "a text before a criterion": ({"stop": "D", "stopping_criteria": ended("x")}, [B, C, D], "BC", "stop", "D"),
    "a criterion before the length": (
        {"stopping_criteria": ended("x"), "max_tokens": 3}, [B, C, D], "BCD", "criterion", "x",
    ),
    "a text before the length": ({"stop": "CD", "max_tokens": 3}, [B, C, D], "B", "stop", "CD"),
    "the length": ({"max_tokens": 3}, [B, C, D], "BCD", "length", None),
    "the end is banned until the minimum": (
        {"min_tokens": 5, "max_tokens": 6}, [B, C, D, E, A, B], "BCDEAB", "length", None,
    ),
    "so are other ids": ({"min_tokens": 3, "stop_token_ids": [C]}, [B, A, B, C], "BAB", "stop", C),
    "a text counts from the minimum's last token on": ({"min_tokens": 2, "stop": "CD"}, [B, C, D], "B", "stop", "CD"),
    "not if it begins before": ({"min_tokens": 3, "stop": "CD"}, [B, C, D, E, END], "BCDE", "stop", END),
    "the end only if allowed": (
        {"allowed_token_ids": [A, B, C, D, E], "max_tokens": 6}, [B, C, D, E, A, B], "BCDEAB", "length", None,
    ),
    "the end ignored": ({"ignore_eos": True, "max_tokens": 7}, [B, C, D, E, END, A, B], "BCDEAB", "length", None),
    "but not other ids": ({"ignore_eos": True, "stop_token_ids": [A]}, [B, C, D, E, END, A], "BCDE", "stop", A),
}  # fmt: skip


def toy(bits: dict[int, dict[int, int]], top_m: int = 8) -> Toy:
    """A decoder whose logits depend on the last token alone. bits: last token -> next token -> bits."""
    follow = np.full((8, 8), NEVER, np.float32)
    for last, row in bits.items():
        follow[last, list(row)] = list(row.values())
    return Toy(
        follow=follow,
        place=np.zeros((CONTEXT, 8), np.float32),
        features=np.zeros((8, FEATURES), np.float32),
        mix=np.zeros((FEATURES, 8), np.float32),
        embeddings=np.eye(8, dtype=np.float32),
        factor=BIT,
        options=TopWOptions(top_m=top_m, metric="uniform"),
    )


def opened(folder: Path, decoder: Toy, sampler: str) -> TopWModel:
    letters = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(NAMES)}, merges=[]))
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens(NAMES[:3])
    export(folder, decoder, form="scatter", with_logits=True, tokenizer=letters)
    return TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1, sampler=sampler)


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory, sampler_choice: str) -> dict[int, TopWModel]:
    """Models by the size of the pool."""
    folder = tmp_path_factory.mktemp("dice")
    always = dict.fromkeys((A, B, C, D, E), DICE)
    return {top_m: opened(folder / str(top_m), toy(always, top_m), sampler_choice) for top_m in (8, 3)}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, sampler_choice: str) -> TopWModel:
    bits = {last: {A: 2, following: 3} for last, following in CHAIN.items()}
    return opened(tmp_path_factory.mktemp("chain") / "out", toy(bits), sampler_choice)


def in_nats(parameters: dict[str, Any]) -> dict[str, Any]:
    biases = {token: bits * BIT for token, bits in parameters.get("logit_bias", {}).items()}
    return {**parameters, "logit_bias": biases}


@pytest.mark.parametrize("name", STEPS)
def test_the_tokens_that_can_be_drawn_and_their_probabilities(dice: dict[int, TopWModel], name: str) -> None:
    prompt, pool, parameters, weights = STEPS[name]
    given = {**WHOLE_POOL, **in_nats(parameters)}
    results = dice[pool].generate(prompt, max_tokens=1, n=40, seed=1, logprobs=0, **given)
    total = sum(weights.values())
    assert {result.kept[0] for result in results} == {len(weights)}
    for result in results:
        (token,), (logprob,) = result.token_ids, result.logprobs
        assert math.exp(logprob) == pytest.approx(float(weights[token] / Fraction(total)), rel=1e-5)
        (entry,) = result.token_logprobs or ()
        assert math.exp(entry.logprob) == pytest.approx(float(SCORES[token]), rel=1e-5)
    assert len({result.token_ids[0] for result in results}) >= min(3, len(weights)), "sequences differ"


@pytest.mark.parametrize(
    "name", [name for name, step in STEPS.items() if step[1] == 8 and not step[2].keys() & {"lam", "allowed_token_ids"}]
)
def test_transformers_gives_the_same_probabilities_except_where_the_table_differs(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prompt, _, parameters, ours = STEPS[name]
    names = {token: NAMES.index(token) for token in prompt}
    settings = {key: value for key, value in in_nats(parameters).items() if key != "logit_bias"}
    if parameters.get("temperature") == 0:
        settings = {}  # greedy there, too: a maximum, not a processor
    biases = in_nats(parameters)["logit_bias"]
    config = transformers.GenerationConfig(
        **settings, sequence_bias=[[[token], bias] for token, bias in biases.items()] or None
    )
    config._eos_token_tensor = None  # set by `generate`
    tiny = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    processors = transformers.GPT2LMHeadModel(tiny)._get_logits_processor(config, input_ids_seq_length=len(prompt))
    logits = torch.full((1, 8), float("-inf"))
    logits[0, list(DICE)] = torch.tensor([bits * BIT for bits in DICE.values()])
    scores = processors(torch.tensor([[names[token] for token in prompt]]), logits)[0]
    if parameters.get("temperature") == 0:
        assert {int(scores.argmax()): 1} == ours
        return
    found = torch.softmax(scores, -1).tolist()
    expected = THEIRS.get(name, ours)
    total = Fraction(sum(expected.values()))
    assert found == pytest.approx([float(expected.get(token, 0) / total) for token in range(8)], abs=1e-6)
    assert (expected == ours) == (name not in THEIRS)


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_ends_as_in_the_table(chain: TopWModel, name: str) -> None:
    parameters, tokens, text, reason, stop = SEQUENCES[name]
    result = chain.generate("A", temperature=0, **{"max_tokens": 8, **parameters})
    assert (result.token_ids, result.text) == (tokens, text)
    assert (result.finish_reason, result.stop) == (reason, stop)


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        # A 3, 2 (as B: the lower id), 1; B 2, 1; C 1
        ({"frequency_penalty": BIT}, [A, A, B, A, B, C]),
        # A 3, then 1; B 2, then 0; after that A 1 (as C: the lower id)
        ({"presence_penalty": 2 * BIT}, [A, B, A, A, A, A]),
        # A 3, then 0; B 2, then -1; C 1, then -2; A 0 (as D), then -1; D 0, then -3; A -1 (as B and E)
        ({"presence_penalty": 2 * BIT, "frequency_penalty": BIT}, [A, B, C, A, D, A]),
        # prompt and drawn tokens: A 3 / 2, B 2, then 1; A 1.5 again
        ({"repetition_penalty": 2.0}, [B, A, A, A, A, A]),
    ],
)
def test_penalties_count_drawn_tokens_as_in_the_table(
    dice: dict[int, TopWModel], parameters: dict[str, Any], tokens: list[int]
) -> None:
    assert dice[8].generate("A", temperature=0, max_tokens=6, **parameters).token_ids == tokens

"""Make random requests.

A new feature of requests is a function with `@sometimes`; a new invalid value is one with `@malformed`. Each changes
the keyword arguments of `Engine.submit` in place, and takes random numbers only from `rng`, so a seed repeats them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from fuzz.engine.models import INVALID_AFTER, INVALID_STATE
from tests.support.toy_model import CONTEXT, VOCAB

Arguments: TypeAlias = "dict[str, Any]"
Change: TypeAlias = "Callable[[np.random.Generator, Arguments], None]"

_FEATURES: list[tuple[float, Change]] = []
_MALFORMED: list[Change] = []
_MOST_PROMPT, _MOST_NEW = 60, 36  # together they fit the context
_SYSTEM_PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB, 12 * seed + 10).tolist() for seed in range(4)]
_CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-h]{2,30}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"enum": [None, True, 17, "é"]}},
    {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}},
    {"grammar": 'start: "(" start ")" | "x"'},
]


def sometimes(share: float) -> Callable[[Change], Change]:
    """Register a function that adds a feature to this share of the requests."""

    def register(change: Change) -> Change:
        _FEATURES.append((share, change))
        return change

    return register


def malformed(change: Change) -> Change:
    """Register a function that makes a request invalid: `submit` or the request must then raise a TopWError."""
    _MALFORMED.append(change)
    return change


def random_request(rng: np.random.Generator, continued: list[int] | None = None) -> Arguments:
    """A random request. It is valid, unless one of its features says otherwise.

    continued: a sequence that the prompt may continue, as the next turn of a chat does.
    """
    given: Arguments = {
        "prompt": _prompt(rng, continued),
        "seed": int(rng.integers(2**63)),
        "max_new_tokens": int(rng.integers(1, _MOST_NEW)),
        "temperature": float(rng.choice([0.0, 1.0, 2.5])),
        "lam": float(rng.choice([0.2, 2.2])),
        "geom_scale": float(rng.choice([0.0, 1.0, -0.5])),
        "ignore_eos": True,
    }
    for share, change in _FEATURES:
        if rng.random() < share:
            change(rng, given)
    return given


def malformed_request(rng: np.random.Generator) -> Arguments:
    given = random_request(rng)
    _MALFORMED[rng.integers(len(_MALFORMED))](rng, given)
    return given


def _prompt(rng: np.random.Generator, continued: list[int] | None) -> list[int]:
    """Random tokens, often after a beginning that other prompts have too."""
    start: list[int] = []
    if continued and len(continued) < _MOST_PROMPT - 5 and rng.random() < 0.7:
        start = continued
    elif rng.random() < 0.5:
        start = _SYSTEM_PROMPTS[rng.integers(len(_SYSTEM_PROMPTS))]
    more = rng.integers(3, VOCAB, rng.integers(1, max(2, _MOST_PROMPT + 1 - len(start)))).tolist()
    return [token for token in [*start, *more][:_MOST_PROMPT] if token not in (INVALID_AFTER, INVALID_STATE)] or [5]


@sometimes(0.1)
def text_prompt(rng: np.random.Generator, given: Arguments) -> None:
    given["prompt"] = "".join(chr(code) for code in rng.integers(97, 123, rng.integers(1, _MOST_PROMPT)))


@sometimes(0.15)
def repetition_penalty(rng: np.random.Generator, given: Arguments) -> None:
    given["repetition_penalty"] = float(rng.choice([0.8, 1.3]))


@sometimes(0.15)
def additive_penalties(rng: np.random.Generator, given: Arguments) -> None:
    given["presence_penalty"], given["frequency_penalty"] = float(rng.normal()), float(rng.normal())


@sometimes(0.15)
def logit_bias(rng: np.random.Generator, given: Arguments) -> None:
    given["logit_bias"] = {int(token): float(rng.normal()) for token in rng.integers(3, VOCAB, rng.integers(1, 60))}


@sometimes(0.15)
def bans(rng: np.random.Generator, given: Arguments) -> None:
    given["suppress_tokens"] = rng.integers(3, VOCAB, rng.integers(1, 40)).tolist()
    given["bad_words_ids"] = [rng.integers(3, VOCAB, rng.integers(1, 4)).tolist() for _ in range(4)]


@sometimes(0.1)
def allowed_tokens(rng: np.random.Generator, given: Arguments) -> None:
    given["allowed_token_ids"] = rng.integers(3, VOCAB, rng.integers(1, 60)).tolist()


@sometimes(0.15)
def no_repeated_ngrams(rng: np.random.Generator, given: Arguments) -> None:
    given["no_repeat_ngram_size"] = int(rng.integers(1, 4))


@sometimes(0.2)
def stop_strings(rng: np.random.Generator, given: Arguments) -> None:
    given["stop_strings"] = [str(rng.choice(list("abcdefgh"))), "zz"]


@sometimes(0.2)
def stop_tokens(rng: np.random.Generator, given: Arguments) -> None:
    given["stop_token_ids"] = rng.integers(3, VOCAB, 12).tolist()
    given["min_new_tokens"] = int(rng.integers(0, 8))


@sometimes(0.15)
def several_samples(rng: np.random.Generator, given: Arguments) -> None:
    given["n"] = int(rng.integers(2, 5))


@sometimes(0.05)
def several_prompts(rng: np.random.Generator, given: Arguments) -> None:
    if isinstance(given["prompt"], list):
        given["prompt"] = [given["prompt"], _prompt(rng, None), _prompt(rng, None)]
        given["seed"] = [given["seed"], 1, 2]


@sometimes(0.12)
def structured_output(rng: np.random.Generator, given: Arguments) -> None:
    """Constrain the text. With bans and biases of other features, some requests have no token left to draw."""
    given["structured_outputs"] = _CONSTRAINTS[rng.integers(len(_CONSTRAINTS))]


@sometimes(0.1)
def log_probabilities(rng: np.random.Generator, given: Arguments) -> None:
    """Ask for log-probabilities. One of the two models has no logits, and refuses."""
    given[str(rng.choice(["logprobs", "prompt_logprobs"]))] = int(rng.integers(0, 4))


@sometimes(0.03)
def invalid_logits(rng: np.random.Generator, given: Arguments) -> None:
    """Make logits NaN, so that the request fails with LogitsError at once or after its first token."""
    if isinstance(given["prompt"], list) and isinstance(given["prompt"][-1], int):
        kind = rng.integers(3)
        if kind == 2:
            given["logit_bias"] = {INVALID_AFTER: 1e6}
        else:
            given["prompt"] = [*given["prompt"][:-1], (INVALID_AFTER, INVALID_STATE)[kind]]


@malformed
def unknown_parameter(rng: np.random.Generator, given: Arguments) -> None:
    given[str(rng.choice(["top_p", "beta_", "metric", "temprature"]))] = 1


@malformed
def wrong_type(rng: np.random.Generator, given: Arguments) -> None:
    name = str(rng.choice(["temperature", "max_new_tokens", "seed", "logit_bias", "stop_strings", "n", "max_time"]))
    given[name] = (object(), "x" * 50, [[]], b"1", {})[rng.integers(5)] if name != "stop_strings" else [1]


@malformed
def out_of_range(rng: np.random.Generator, given: Arguments) -> None:
    name, value = (
        ("temperature", -1.0), ("temperature", float("nan")), ("max_new_tokens", 0), ("seed", 2**64), ("seed", -1),
        ("max_time", 0.0), ("max_time", float("inf")), ("n", 0), ("n", 10**9), ("repetition_penalty", 0.0),
        ("logit_bias", {VOCAB: 1.0}), ("suppress_tokens", [-1]), ("presence_penalty", float("inf")),
    )[rng.integers(13)]  # fmt: skip
    given[name] = value


@malformed
def bad_prompt(rng: np.random.Generator, given: Arguments) -> None:
    given["prompt"] = (
        [], "", [5] * (CONTEXT + 1), "x" * 10**5, [VOCAB], [-1], [5, None], object(), {"input_ids": 3}, [[5], []],
        "\ud800",
    )[rng.integers(11)]  # fmt: skip


@malformed
def bad_grammar(rng: np.random.Generator, given: Arguments) -> None:
    given["structured_outputs"] = (
        {"regex": "("}, {"json": "{"}, {"json": {"type": "nothing"}}, {"grammar": "start: nowhere"}, {"choice": []},
        {"regex": "a", "choice": ["b"]}, {"json": {"$ref": "http://example.org/"}}, {"regex": ""}, 3,
    )[rng.integers(9)]  # fmt: skip


@malformed
def contradiction(rng: np.random.Generator, given: Arguments) -> None:
    given["max_length"] = 90

"""The choice of a replica by the beginning of the prompt."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from topw_deploy.serve.ray import choose_replica, order_replicas, prefix_key

NAMES = tuple(f"replica-{number}" for number in range(10))
KEYS = [f"prompt {number}" for number in range(2000)]


def key(fields: Any, characters: int = 10) -> str:
    return prefix_key(json.dumps(fields).encode(), characters)


def test_the_key_is_the_model_and_the_beginning_of_the_prompt() -> None:
    assert key({"model": "m", "prompt": "0123456789abc"}) == "m\n0123456789"
    assert key({"model": "m", "prompt": "0123456789xyz"}) == "m\n0123456789"
    assert key({"model": "n", "prompt": "0123456789abc"}) != key({"model": "m", "prompt": "0123456789abc"})
    assert key({"prompt": [1, 2, 3, 4, 5]}) == "\n[1, 2, 3, "
    system = {"role": "system", "content": "You are a lawyer."}
    turns = [{"role": "user", "content": text} for text in ("Hello", "Goodbye")]
    assert key({"messages": [system, turns[0]]}, 40) == key({"messages": [system, turns[1]]}, 40) != ""
    assert key({"input": "Hi"}) == "\nHi"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"prompt": ""}', b"{}", b"[" * 100_000])
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert prefix_key(body, 10) == ""


def test_no_characters_mean_no_key() -> None:
    assert key({"prompt": "abc"}, 0) == ""


def test_keys_are_spread_over_the_replicas() -> None:
    """A binomial count of mean 200 exceeds 280 with a probability below 1e-8."""
    counts = Counter(order_replicas(each, NAMES)[0] for each in KEYS)
    assert len(counts) == len(NAMES)
    assert max(counts.values()) < 280


def test_a_lost_replica_moves_only_its_own_keys() -> None:
    left = NAMES[:3] + NAMES[4:]
    for each in KEYS[:200]:
        before, after = NAMES[order_replicas(each, NAMES)[0]], left[order_replicas(each, left)[0]]
        assert before in (after, NAMES[3])
        if before == NAMES[3]:
            assert after == NAMES[order_replicas(each, NAMES)[1]]


def test_a_replica_with_too_much_to_do_is_passed_over() -> None:
    order = (2, 0, 1)
    assert choose_replica(order, [0, 0, 0], 1.25) == 2
    assert choose_replica(order, [3, 3, 4], 1.25) == 2  # the bound is ceil(1.25 * 11 / 3) = 5
    assert choose_replica(order, [3, 3, 5], 1.25) == 0
    assert choose_replica(order, [5, 2, 5], 1.0) == 1  # ceil(13 / 3) = 5
    assert choose_replica((0,), [100], 1.0) == 0

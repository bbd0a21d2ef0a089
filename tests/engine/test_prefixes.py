"""Which slot a prompt takes. How much it reuses, and which snapshots stay: test_reuse.py, test_fixed_states.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from topw_deploy.engine.prefixes import Prefixes, Snapshots


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int64)


@pytest.mark.parametrize(
    ("slots", "slot"),
    [
        (["", "abc", "abcd"], 2),  # the slot that shares most tokens
        (["", "abx", "axx"], 1),  # a slot that loses fewer tokens than it shares
        (["abxx", "ab", "abx"], 1),  # of the slots that share most, the one that loses fewest
        (["xy", "abxxx", ""], 2),  # slot 1 would lose more than it shares, so the first empty slot
        (["xy", "abxxx", "z"], 1),  # no slot is empty, so the slot that was released first
        (["", "", ""], 0),
    ],
)
def test_a_prompt_takes_the_slot_that_loses_least(slots: list[str], slot: int) -> None:
    decoder: Any = SimpleNamespace(states=(), recurs=False)
    batch: Any = SimpleNamespace(copies_slots=True, keep_tokens=lambda slot, tokens: None)
    prefixes = Prefixes(batch, decoder, 3, chunk=1)
    prefixes._held = [ids(text) for text in slots]
    for released in (1, 2, 0):
        prefixes.release_slot(released, None)
    assert prefixes.choose_slot(ids("abcd"), [0, 1, 2]) == slot


def test_states_of_fixed_size_that_were_used_longest_ago_make_room() -> None:
    """Growing states: test_reuse.py."""
    snapshots = Snapshots(2)
    for text in ("a", "b"):
        snapshots.store(ids(text), 1, list, is_fixed=True)
    assert snapshots.find_fixed(ids("a")) is not None
    snapshots.store(ids("c"), 1, list, is_fixed=True)
    found = [text for text in "abc" if snapshots.find_fixed(ids(text)) is not None]
    assert found == ["a", "c"]

"""How many tokens a prompt can reuse, which slot it takes, and which snapshots stay stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.samples import examples
from topw_deploy.engine.prefixes import NO_TOKENS, Prefixes, Snapshots, shared_length


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int64)


def prefixes_of(recurs: bool = False, **options: Any) -> Prefixes:
    """Prefixes of three slots, without a batch."""
    decoder: Any = SimpleNamespace(states=(), recurs=recurs)
    batch: Any = SimpleNamespace(copies_slots=True, keep_tokens=lambda slot, tokens: None)
    return Prefixes(batch, decoder, 3, **{"chunk": 1, **options})


texts = st.text("ab", max_size=8).map(ids)


def beginnings(tokens: np.ndarray) -> set[tuple[int, bytes]]:
    return {(n, bytes(tokens[:n])) for n in range(len(tokens) + 1)}


@given(held=texts, wanted=texts, unit=st.integers(1, 3))
@settings(max_examples=examples(200))
def test_the_longest_shared_beginning_is_reusable(held: np.ndarray, wanted: np.ndarray, unit: int) -> None:
    shared = beginnings(held) & beginnings(wanted)
    reusable = prefixes_of(chunk=unit, exact=True)._reusable_count(held, wanted)
    assert reusable == max(n for n, _ in shared if n % unit == 0)


@given(held=texts, wanted=texts, stored=st.lists(texts), in_slot=st.booleans())
@settings(max_examples=examples(200))
def test_states_of_fixed_size_are_reusable_where_they_are_known(
    held: np.ndarray, wanted: np.ndarray, stored: list[np.ndarray], in_slot: bool
) -> None:
    """After beginnings of both sequences for which they are stored, and after all tokens of a slot."""
    shared = beginnings(held) & beginnings(wanted)
    known = {(len(tokens), bytes(tokens)) for tokens in [NO_TOKENS, *stored, *([held] if in_slot else [])]}
    lengths = [len(tokens) for tokens in stored if (len(tokens), bytes(tokens)) in beginnings(wanted)]
    longest = max(n for n, _ in shared & known)
    by_engine = prefixes_of(recurs=True, exact=not in_slot)
    assert by_engine._reusable_count(held, wanted, lengths) == longest
    by_holder = prefixes_of(recurs=True)
    assert by_holder._reusable_count(held, wanted, lengths, in_slot=in_slot) == longest


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
    prefixes = prefixes_of()
    prefixes._held = [ids(text) for text in slots]
    for released in (1, 2, 0):
        prefixes.release_slot(released, None)
    assert prefixes.choose_slot(ids("abcd"), [0, 1, 2]) == slot


class LeastRecentlyUsed(RuleBasedStateMachine):
    """Compares Snapshots with a list of (text, is_fixed, size) in the order of use."""

    @initialize(most=st.integers(0, 30))
    def begin(self, most: int) -> None:
        self.snapshots: Any = Snapshots(most)
        self.model: list[tuple[str, bool, int]] = []

    def has(self, text: str, is_fixed: bool) -> bool:
        return any(
            kind == is_fixed and (held == text if is_fixed else held.startswith(text)) for held, kind, _ in self.model
        )

    @rule(text=st.text("ab", max_size=3), size=st.integers(1, 12), is_fixed=st.booleans())
    def put(self, text: str, size: int, is_fixed: bool) -> None:
        wanted = bool(text) and size <= self.snapshots.max_bytes and not self.has(text, is_fixed)
        self.snapshots.store(ids(text), size, lambda: (text, is_fixed), is_fixed=is_fixed)
        if not wanted:
            return
        if not is_fixed:
            self.model = [one for one in self.model if one[1] or not text.startswith(one[0])]
        while sum(one[2] for one in self.model) + size > self.snapshots.max_bytes:
            self.model.pop(0)
        self.model.append((text, is_fixed, size))

    @rule(text=st.text("ab", min_size=1, max_size=3))
    def find_fixed_states(self, text: str) -> None:
        found = self.snapshots.find_fixed(ids(text))
        assert found == ((text, True) if self.has(text, True) else None)
        self.model.sort(key=lambda one: one[:2] == (text, True))

    @rule(text=st.text("ab", min_size=1, max_size=3))
    def find_growing_states(self, text: str) -> None:
        fixed = {held for held, is_fixed, _ in self.model if is_fixed and text.startswith(held)}
        assert sorted(self.snapshots.fixed_lengths(ids(text))) == sorted(map(len, fixed))
        most = max((len(held) for held in fixed if self.has(held, False)), default=0)

        def reusable(tokens: np.ndarray) -> int:
            return max((len(held) for held in fixed if len(held) <= shared_length(tokens, ids(text))), default=0)

        found = self.snapshots.find_growing(reusable, 1)
        assert (found[0] if found else 0) == most
        if found:
            assert found[1][0].startswith(text[:most])
            self.model.sort(key=lambda one: one[:2] == found[1])

    @invariant()
    def both_hold_the_same(self) -> None:
        if hasattr(self, "snapshots"):
            stored = [(*one.states, one.size) for one in self.snapshots._snapshots.values()]
            assert stored == self.model
            assert self.snapshots.bytes == sum(one[2] for one in self.model) <= self.snapshots.max_bytes


TestLeastRecentlyUsed = LeastRecentlyUsed.TestCase

"""What a prompt can reuse, which row it takes, and which snapshots stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.samples import examples
from topw_deploy.engine.prefixes import NOTHING, RowPrefixes, Rule, Snapshots, common


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int64)


texts = st.text("ab", max_size=8).map(ids)


def beginnings(tokens: np.ndarray) -> set[tuple[int, bytes]]:
    return {(n, bytes(tokens[:n])) for n in range(len(tokens) + 1)}


@given(held=texts, wanted=texts, unit=st.integers(1, 3))
@settings(max_examples=examples(200))
def test_what_is_usable_is_the_longest_shared_beginning(held: np.ndarray, wanted: np.ndarray, unit: int) -> None:
    shared = beginnings(held) & beginnings(wanted)
    assert Rule(unit).usable(held, wanted) == max(n for n, _ in shared if n % unit == 0)


@given(held=texts, wanted=texts, stored=st.lists(texts), own=st.booleans())
@settings(max_examples=examples(200))
def test_states_of_fixed_size_are_usable_where_they_are_known(
    held: np.ndarray, wanted: np.ndarray, stored: list[np.ndarray], own: bool
) -> None:
    """At stored points of both sequences, and at the end of what a row holds."""
    shared = beginnings(held) & beginnings(wanted)
    known = {(len(tokens), bytes(tokens)) for tokens in [NOTHING, *stored, *([held] if own else [])]}
    points = [len(tokens) for tokens in stored if (len(tokens), bytes(tokens)) in beginnings(wanted)]
    assert Rule(whole=True, own=own).usable(held, wanted, points) == max(n for n, _ in shared & known)
    assert Rule(whole=True).usable(held, wanted, points, own=own) == max(n for n, _ in shared & known)


@pytest.mark.parametrize(("one", "other", "count"), [("", "ab", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("b", "a", 0)])
def test_common_counts_the_tokens_with_which_both_begin(one: str, other: str, count: int) -> None:
    assert common(ids(one), ids(other)) == common(ids(other), ids(one)) == count


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        (["", "abc", "abcd"], 2),  # shares most
        (["", "abx", "axx"], 1),  # loses less than it shares
        (["abxx", "ab", "abx"], 1),  # of those that share most, the one that loses least
        (["xy", "abxxx", ""], 2),  # would lose more than it shares: the first that holds nothing
        (["xy", "abxxx", "z"], 1),  # the one released first
        (["", "", ""], 0),
    ],
)
def test_a_prompt_takes_the_row_that_loses_least(rows: list[str], row: int) -> None:
    prefixes = RowPrefixes(3, Rule())
    prefixes.held = [ids(text) for text in rows]
    for released in (1, 2, 0):
        prefixes.release(released)
    assert prefixes.choose(ids("abcd"), [0, 1, 2]) == row


def test_rows_in_use_are_not_chosen_and_exchanged_rows_keep_their_tokens() -> None:
    prefixes = RowPrefixes(3, Rule())
    prefixes.held = [ids("abcd"), ids("abc"), ids("x")]
    assert prefixes.choose(ids("abcd"), [1, 2]) == 1
    prefixes.release(0)
    prefixes.exchange(0, 2)
    assert prefixes.choose(ids("abcd"), [1, 2]) == 2
    assert prefixes.by_age() == [0, 1, 2]


def names(snapshots: Snapshots[str], *prompts: str) -> list[str]:
    """The states found for each prompt, without marking them as used."""
    order = list(snapshots._stored)
    found = [snapshots.find(ids(prompt), 1) for prompt in prompts]
    for number in order:
        snapshots._stored.move_to_end(number)
    return ["" if one is None else one[1] for one in found]


def test_the_snapshot_used_longest_ago_is_dropped_first() -> None:
    snapshots: Snapshots[str] = Snapshots(30, Rule())
    for text in ("aa", "bb", "cc"):
        assert snapshots.takes(ids(text), 10)
        snapshots.put(ids(text), text, 10)
    assert snapshots.find(ids("aax"), 1) == (2, "aa")  # used
    snapshots.put(ids("dd"), "dd", 10)
    assert names(snapshots, "aax", "bbx", "ccx", "ddx") == ["aa", "", "cc", "dd"]
    snapshots.put(ids("ee"), "ee", 20)
    assert names(snapshots, "aax", "ccx", "ddx", "eex") == ["", "", "dd", "ee"]
    assert (len(snapshots), snapshots.bytes) == (2, 30)


def test_snapshots_larger_than_the_bound_are_not_taken() -> None:
    assert not Snapshots(9, Rule()).takes(ids("aa"), 10)
    assert not Snapshots(9, Rule()).takes(NOTHING, 0)


def test_a_longer_snapshot_replaces_those_that_it_can_be_used_instead_of() -> None:
    snapshots: Snapshots[str] = Snapshots(100, Rule())
    for text in ("ab", "x", "abc"):
        snapshots.put(ids(text), text, 10)
    assert (len(snapshots), snapshots.bytes) == (2, 20)
    assert snapshots.find(ids("abz"), 1) == (2, "abc")
    assert not snapshots.takes(ids("ab"), 10)
    assert snapshots.takes(ids("abd"), 10)


def test_a_snapshot_is_used_up_to_a_point_and_points_replace_nothing() -> None:
    snapshots: Snapshots[str] = Snapshots(100, Rule(whole=True))
    for text in ("ab", "abcd"):
        assert snapshots.takes(ids(text), 10, point=True)
        snapshots.put(ids(text), text, 10, point=True)
    assert snapshots.find(ids("abcx"), 1, snapshots.points(ids("abcx"))) is None  # nobody has its keys and values
    snapshots.put(ids("abcd"), "keys", 10)
    assert snapshots.points(ids("abcx")) == [2]
    assert snapshots.find(ids("abcx"), 1, [2]) == (2, "keys")
    assert snapshots.find(ids("abcde"), 1, snapshots.points(ids("abcde"))) == (4, "keys")
    assert [snapshots.point(ids(text)) for text in ("ab", "abc", "abcd")] == ["ab", None, "abcd"]
    assert not snapshots.takes(ids("ab"), 10, point=True)
    assert not snapshots.takes(ids("abc"), 10)
    assert snapshots.takes(ids("abc"), 10, point=True)
    assert (snapshots.common(ids("abcx")), len(snapshots), snapshots.bytes) == (3, 3, 30)


class LeastRecentlyUsed(RuleBasedStateMachine):
    """Snapshots beside a list in the order of use. A snapshot with its beginnings counts as one."""

    @initialize(most=st.integers(0, 30))
    def begin(self, most: int) -> None:
        self.snapshots: Snapshots[tuple[str, bool]] = Snapshots(most, Rule(whole=True))
        self.model: list[tuple[str, bool, int]] = []

    def has(self, text: str, point: bool) -> bool:
        return any(p == point and (held == text if point else held.startswith(text)) for held, p, _ in self.model)

    @rule(text=st.text("ab", max_size=3), size=st.integers(1, 12), point=st.booleans())
    def put(self, text: str, size: int, point: bool) -> None:
        wanted = bool(text) and size <= self.snapshots.most and not self.has(text, point)
        assert self.snapshots.takes(ids(text), size, point=point) == wanted
        if not wanted:
            return
        self.snapshots.put(ids(text), (text, point), size, point=point)
        if not point:
            self.model = [one for one in self.model if one[1] or not text.startswith(one[0])]
        while sum(one[2] for one in self.model) + size > self.snapshots.most:
            self.model.pop(0)
        self.model.append((text, point, size))

    @rule(text=st.text("ab", min_size=1, max_size=3))
    def use_a_point(self, text: str) -> None:
        found = self.snapshots.point(ids(text))
        assert found == ((text, True) if self.has(text, True) else None)
        self.model.sort(key=lambda one: one[:2] == (text, True))

    @rule(text=st.text("ab", min_size=1, max_size=3))
    def use_a_snapshot(self, text: str) -> None:
        points = {held for held, point, _ in self.model if point and text.startswith(held)}
        assert sorted(self.snapshots.points(ids(text))) == sorted(map(len, points))
        most = max((len(point) for point in points if self.has(point, False)), default=0)
        found = self.snapshots.find(ids(text), 1, self.snapshots.points(ids(text)))
        assert (found[0] if found else 0) == most
        if found:
            assert found[1][0].startswith(text[:most])
            self.model.sort(key=lambda one: one[:2] == found[1])

    @invariant()
    def both_hold_the_same(self) -> None:
        if hasattr(self, "snapshots"):
            stored = [(*one.states, one.size) for one in self.snapshots._stored.values()]
            assert stored == self.model
            assert self.snapshots.bytes == sum(one[2] for one in self.model) <= self.snapshots.most


TestLeastRecentlyUsed = LeastRecentlyUsed.TestCase


def test_a_snapshot_must_be_better_than_what_is_there() -> None:
    snapshots: Snapshots[str] = Snapshots(100, Rule())
    snapshots.put(ids("ab"), "ab", 10)
    assert snapshots.find(ids("abz"), 3) is None
    assert snapshots.find(ids("b"), 1) is None

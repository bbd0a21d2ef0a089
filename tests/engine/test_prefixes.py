"""What a prompt can reuse, which row it takes, and which snapshots stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topw_deploy.engine.prefixes import NOTHING, RowPrefixes, Rule, Snapshots, common


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int64)


texts = st.text("ab", max_size=8).map(ids)


@given(held=texts, prompt=texts.filter(len), unit=st.integers(1, 3), whole=st.booleans())
@settings(max_examples=200)
def test_what_is_usable_is_a_shared_beginning_that_leaves_a_token(
    held: np.ndarray, prompt: np.ndarray, unit: int, whole: bool
) -> None:
    shared = [n for n in range(min(len(held) + 1, len(prompt))) if held[:n].tolist() == prompt[:n].tolist()]
    lengths = [n for n in shared if n % unit == 0 and (n == len(held) or not whole)]
    assert Rule(unit, whole=whole).usable(held, prompt) == max(lengths, default=0)


@pytest.mark.parametrize(("one", "other", "count"), [("", "ab", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("b", "a", 0)])
def test_common_tokens(one: str, other: str, count: int) -> None:
    assert common(ids(one), ids(other)) == common(ids(other), ids(one)) == count


@pytest.mark.parametrize(
    ("rows", "row"),
    [
        (["", "abc", "abcd"], 2),  # shares most
        (["", "abx", "axx"], 1),  # loses less than it shares
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
    assert prefixes.choose(ids("abcde"), [0, 1, 2]) == row


def test_rows_in_use_are_not_chosen_and_exchanged_rows_keep_their_tokens() -> None:
    prefixes = RowPrefixes(3, Rule())
    prefixes.held = [ids("abcd"), ids("abc"), ids("x")]
    assert prefixes.choose(ids("abcde"), [1, 2]) == 1
    prefixes.release(0)
    prefixes.exchange(0, 2)
    assert prefixes.choose(ids("abcde"), [1, 2]) == 2
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


def test_snapshots_of_states_of_fixed_size_replace_none_but_their_equals() -> None:
    snapshots: Snapshots[str] = Snapshots(100, Rule(whole=True))
    for text in ("ab", "abc"):
        assert snapshots.takes(ids(text), 10)
        snapshots.put(ids(text), text, 10)
    assert snapshots.find(ids("abz"), 1) == (2, "ab")
    assert snapshots.find(ids("abcd"), 1) == (3, "abc")
    assert not snapshots.takes(ids("ab"), 10)


def test_a_snapshot_must_be_better_than_what_is_there() -> None:
    snapshots: Snapshots[str] = Snapshots(100, Rule())
    snapshots.put(ids("ab"), "ab", 10)
    assert snapshots.find(ids("abz"), 3) is None
    assert snapshots.find(ids("b"), 1) is None

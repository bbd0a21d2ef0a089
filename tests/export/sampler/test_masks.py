"""Masks of allowed tokens in every form: against the reference, by hand, and beside edits and other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.function_cases import FORMS, by_hand, feeds, opened, run
from tests.support.rows import MASKS, Case, random_case, some_allowed
from tests.support.rows import packed as packed_by_hand
from tests.support.samples import slow
from topw_deploy.sampling import apply_edits, pack_mask
from topw_deploy.sampling.row import apply_mask, mask_words

VOCABULARIES = (1, 31, 32, 33, 300, 8192)  # below, at and above whole words; whole blocks that are read in place


def in_forms(*vocabularies: int) -> list[Any]:
    """Forms and vocabularies, of which `make quick` tests those with 33 tokens, and one with whole blocks."""
    quick = [*((form, 33) for form in FORMS), (FORMS[0], 8192)]
    given = [(form, vocab) for vocab in vocabularies for form in FORMS]
    return [case if case in quick else slow(*case) for case in given]


def random_masks(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """int32 [rows, words]: all kinds of masks, the last row's without any allowed token; random bits at the end."""
    flags = np.stack([some_allowed(rng, vocab, str(rng.choice(MASKS))) for _ in range(rows)])
    flags[-1] = False
    return packed_by_hand(flags, beyond=bool(rng.integers(2)))


@pytest.mark.parametrize(("form", "vocab"), in_forms(*VOCABULARIES))
def test_words_of_ones_change_no_bit(form: str, vocab: int) -> None:
    *_, session = opened(form, vocab)
    rng = np.random.default_rng(vocab + 1)
    cases = [random_case(rng, vocab) for _ in range(16)]
    for edits in (0, 3):
        without = run(session, feeds(cases, edits))
        with_ones = run(session, feeds(cases, edits, words=mask_words(vocab)))
        for name, values in without.items():
            assert np.array_equal(values, with_ones[name]), (name, edits)


@pytest.mark.parametrize("form", FORMS)
def test_masks_by_hand(form: str) -> None:
    *_, session = opened(form, 33)
    logits = np.arange(33, dtype=np.float32)
    broken = np.where(np.isin(np.arange(33), [4, 31]), [np.nan], logits).astype(np.float32)
    cases = [by_hand(row, "top_w", temperature=0.0) for row in (logits, logits, logits, logits, broken, broken)]
    words = np.array(
        [[-1, -1], [-1, 0], [0b1000, 0], [0, 2], [-1 ^ 1 << 4 ^ -(2**31), 1], [-1 ^ 1 << 4, 1]], np.int32
    )  # all; the first 32; one; only a bit beyond; without both NaN; with one of them
    found = run(session, feeds(cases) | {"allowed": words})
    assert found["next_token"].tolist() == [32, 31, 3, -1, 32, -1]
    assert found["kept"].tolist() == [1, 1, 1, 0, 1, 0]
    assert found["certified"].tolist() == [True, True, True, False, True, False]
    assert found["mass"].tolist() == [1, 1, 1, 0, 1, 0]
    assert [np.flatnonzero(row).tolist() for row in found["keep_mask"]] == [[32], [31], [3], [], [32], []]


@pytest.mark.parametrize(("form", "vocab"), in_forms(300, 8192))
def test_the_mask_comes_after_the_edits(form: str, vocab: int) -> None:
    *_, session = opened(form, vocab)
    rng = np.random.default_rng(5)
    rows = [random_case(rng, vocab) for _ in range(12)]
    inputs = feeds(rows, edits=4)
    flags = rng.random((12, vocab)) < 0.3
    for index, row in enumerate(rows):
        ids = rng.permutation(vocab)[:4]
        inputs["edit_ids"][index] = ids
        inputs["edit_penalty"][index] = [0.5, 2.0, -1.0, 1.0]
        inputs["edit_bias"][index] = [3.0, -np.inf, 0.0, np.inf]
        flags[index, ids[2:]] = False  # their edits would make the row invalid
        edits = (ids, inputs["edit_penalty"][index], inputs["edit_bias"][index])
        logits = np.where(flags[index], apply_edits(row.logits, *edits), np.float32(-np.inf))
        rows[index] = Case(logits, row.parameters, row.uniform, row.regime)
    inputs["allowed"] = pack_mask(flags)
    masked, plain = run(session, inputs), run(session, feeds(rows))
    assert (plain["next_token"] >= 0).any()
    for name, values in masked.items():
        assert np.array_equal(values, plain[name]), name


@pytest.mark.slow
@settings(max_examples=80)
@given(
    form=st.sampled_from(FORMS),
    vocab=st.sampled_from(VOCABULARIES[1:]),
    seed=st.integers(0, 2**20),
    unmasked=st.sets(st.integers(0, 5)),
)
def test_a_row_has_the_same_bits_masked_beside_other_rows_or_given_with_minus_infinities(
    form: str, vocab: int, seed: int, unmasked: set[int]
) -> None:
    *_, session = opened(form, vocab)
    rng = np.random.default_rng(seed)
    rows = [random_case(rng, vocab) for _ in range(6)]
    words = random_masks(rng, 6, vocab)
    words[list(unmasked)] = -1
    together = run(session, feeds(rows) | {"allowed": words})
    written = [Case(apply_mask(r.logits, w), r.parameters, r.uniform, "") for r, w in zip(rows, words, strict=True)]
    plain = run(session, feeds(written))
    for name, values in together.items():
        assert np.array_equal(values, plain[name]), name

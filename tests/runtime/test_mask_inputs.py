"""`MaskInputs` holds the masks of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.inputs import MaskInputs


def mask(*words: int) -> np.ndarray:
    return np.array(words, np.int32)


def test_a_batch_without_masks_has_no_words() -> None:
    masks = MaskInputs(3, 2)
    assert masks.array.shape == (3, 0)
    assert masks.array.dtype == np.int32
    assert not masks.is_active


def test_the_first_mask_gives_all_rows_words_but_forbids_tokens_in_its_row_only() -> None:
    masks = MaskInputs(3, 2)
    given = mask(5, 0)
    masks.set(1, given)
    given[:] = 7  # the mask is a copy
    assert masks.array.tolist() == [[-1, -1], [5, 0], [-1, -1]]
    assert masks.is_active


def test_without_masks_there_are_no_words_and_new_words_allow_everything() -> None:
    masks = MaskInputs(2, 1)
    masks.set(0, mask(1))
    masks.set(1, mask(2))
    masks.clear(0)
    masks.clear(0)
    assert masks.array.tolist() == [[-1], [2]]
    masks.clear(1)
    assert masks.array.shape == (2, 0)
    masks.set(0, mask(3))
    assert masks.array.tolist() == [[3], [-1]]


def test_a_graph_that_always_takes_masks_gets_ones() -> None:
    masks = MaskInputs(2, 3, always=True)
    assert masks.array.tolist() == [[-1] * 3] * 2
    assert not masks.is_active


def test_rows_are_exchanged_with_their_masks() -> None:
    masks = MaskInputs(3, 1)
    masks.swap(0, 1)
    assert masks.array.shape == (3, 0)
    masks.set(0, mask(1))
    masks.swap(0, 2)
    assert masks.array.tolist() == [[-1], [-1], [1]]
    masks.clear(2)
    assert not masks.is_active


@pytest.mark.parametrize("words", [mask(1), mask(1, 2, 3), np.zeros(2, np.int64), np.zeros((1, 2), np.int32)])
def test_a_mask_of_another_shape_or_type_is_refused_and_changes_nothing(words: np.ndarray) -> None:
    masks = MaskInputs(2, 2)
    masks.set(0, mask(3, 4))
    with pytest.raises(ParameterError, match=r"must be int32 \[2\]"):
        masks.set(0, words)
    assert masks.array.tolist() == [[3, 4], [-1, -1]]

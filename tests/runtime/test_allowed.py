"""`Allowed` holds a batch's masks and passes only changes to a binding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.row_inputs import Allowed


class Recorder:
    """A binding that records calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def bind_array(self, name: str, array: np.ndarray) -> None:
        assert name == "allowed"
        self.calls.append(array.shape)

    def refresh(self, name: str) -> None:
        assert name == "allowed"
        self.calls.append("refresh")


def mask(*words: int) -> np.ndarray:
    return np.array(words, np.int32)


def test_a_batch_without_masks_has_no_words() -> None:
    allowed = Allowed(3, 2)
    assert allowed.array.shape == (3, 0)
    assert allowed.array.dtype == np.int32
    assert not allowed.active


def test_the_first_mask_gives_all_rows_words_and_only_its_row_bits_that_forbid() -> None:
    allowed = Allowed(3, 2)
    given = mask(5, 0)
    allowed.set(1, given)
    given[:] = 7  # the mask is a copy
    assert allowed.array.tolist() == [[-1, -1], [5, 0], [-1, -1]]
    assert allowed.active


def test_the_words_go_with_the_last_mask_and_come_back_as_ones() -> None:
    allowed = Allowed(2, 1)
    allowed.set(0, mask(1))
    allowed.set(1, mask(2))
    allowed.clear(0)
    allowed.clear(0)
    assert allowed.array.tolist() == [[-1], [2]]
    allowed.clear(1)
    assert allowed.array.shape == (2, 0)
    allowed.set(0, mask(3))
    assert allowed.array.tolist() == [[3], [-1]]


def test_a_graph_that_always_takes_masks_gets_ones() -> None:
    allowed = Allowed(2, 3, always=True)
    assert allowed.array.tolist() == [[-1] * 3] * 2
    assert not allowed.active


def test_rows_are_exchanged_with_their_masks() -> None:
    allowed = Allowed(3, 1)
    allowed.swap(0, 1)
    assert allowed.array.shape == (3, 0)
    allowed.set(0, mask(1))
    allowed.swap(0, 2)
    assert allowed.array.tolist() == [[-1], [-1], [1]]
    allowed.clear(2)
    assert not allowed.active


def test_a_binding_gets_new_shapes_and_changes_once() -> None:
    allowed, binding = Allowed(2, 4), Recorder()
    allowed.bind(binding)
    allowed.prepare(binding)
    allowed.set(0, mask(1, 2, 3, 4))
    allowed.prepare(binding)
    allowed.prepare(binding)
    allowed.set(0, mask(1, 2, 3, 5))
    allowed.set(1, mask(1, 2, 3, 5))
    allowed.prepare(binding)
    allowed.clear(0)
    allowed.prepare(binding)
    allowed.clear(1)
    allowed.prepare(binding)
    allowed.bind(binding, slice(1))
    assert binding.calls == [(2, 0), (2, 4), "refresh", "refresh", (2, 0), (1, 0)]


@pytest.mark.parametrize("words", [mask(1), mask(1, 2, 3), np.zeros(2, np.int64), np.zeros((1, 2), np.int32)])
def test_a_mask_of_another_shape_or_type_is_refused_and_changes_nothing(words: np.ndarray) -> None:
    allowed = Allowed(2, 2)
    allowed.set(0, mask(3, 4))
    with pytest.raises(ParameterError, match=r"must be int32 \[2\]"):
        allowed.set(0, words)
    assert allowed.array.tolist() == [[3, 4], [-1, -1]]

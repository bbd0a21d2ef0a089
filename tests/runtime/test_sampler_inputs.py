"""`SamplerInputs.update` passes each change to a binding once, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.prepared import prepare
from tests.support.toy_model import VOCAB
from topw_deploy.runtime.inputs import EDIT_INPUTS, RULE_INPUTS, BoundInputs, SamplerInputs
from topw_deploy.runtime.sequence import Sequence
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.row import mask_words

WORDS = mask_words(VOCAB)
ROW = {*PARAMETER_NAMES, *RULE_INPUTS, *EDIT_INPUTS}


class RecordingBinding:
    """Records the inputs that are bound, with their shapes, and those that are refreshed, since the last `take`."""

    def __init__(self) -> None:
        self.bound: dict[str, tuple[int, ...]] = {}
        self.refreshed: set[str] = set()

    def bind_array(self, name: str, array: np.ndarray) -> None:
        self.bound[name] = array.shape

    bind_changing = bind_array

    def refresh(self, name: str) -> None:
        self.refreshed.add(name)

    def take(self) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        taken = self.bound, self.refreshed
        self.bound, self.refreshed = {}, set()
        return taken


def new_inputs(rows: int, *, always_masked: bool = False) -> SamplerInputs:
    limits = {"fixed_edits": None, "most_edits": None, "mask_words": WORDS, "always_masked": always_masked}
    return SamplerInputs(cast(Any, SimpleNamespace(**limits)), rows)


def bind(inputs: SamplerInputs, rows: slice = slice(None)) -> tuple[BoundInputs, RecordingBinding]:
    binding = RecordingBinding()
    return inputs.bind(cast(Any, binding), rows), binding


def request(**parameters: Any) -> Sequence:
    return prepare(parameters, [[5, 6]])[0]


def changes(inputs: SamplerInputs, bound: BoundInputs, binding: RecordingBinding) -> Any:
    """What an update passes to the binding. A second update passes nothing, unless a row has edits."""
    inputs.update(bound)
    taken = binding.take()
    inputs.update(bound)
    assert binding.take() == ({}, set(EDIT_INPUTS) if inputs.edits.is_active else set())
    return taken


def test_binding_rows_binds_every_input_of_them() -> None:
    bound, binding = bind(new_inputs(3), slice(2))
    shapes, refreshed = binding.take()
    assert shapes.pop("rule_values") == (2, 2)
    assert [shapes.pop(name) for name in (*EDIT_INPUTS, "allowed")] == [(2, 0)] * 4
    assert shapes == dict.fromkeys(("uniform", "rule", *PARAMETER_NAMES), (2,))
    assert not refreshed
    assert bound.rows == slice(2)


def test_an_update_without_changes_passes_nothing() -> None:
    inputs = new_inputs(2)
    bound, binding = bind(inputs)
    binding.take()
    assert changes(inputs, bound, binding) == ({}, set())


def test_setting_clearing_and_exchanging_rows_refreshes_their_inputs() -> None:
    inputs = new_inputs(2)
    bound, binding = bind(inputs)
    binding.take()
    inputs.set(1, request(temperature=0.5, rule="top_k", top_k=3))
    assert changes(inputs, bound, binding) == ({}, ROW)
    inputs.swap(0, 1)
    assert changes(inputs, bound, binding) == ({}, ROW)
    inputs.clear(0)
    assert changes(inputs, bound, binding) == ({}, ROW)


def test_edits_are_bound_when_they_get_slots_and_refreshed_at_every_step() -> None:
    inputs = new_inputs(2)
    bound, binding = bind(inputs, slice(1))
    binding.take()
    inputs.set(0, request(logit_bias={3: 1.0}))
    shapes, _ = changes(inputs, bound, binding)
    assert shapes == dict.fromkeys(EDIT_INPUTS, (1, 16))
    inputs.clear(0)
    shapes, _ = changes(inputs, bound, binding)
    assert shapes == dict.fromkeys(EDIT_INPUTS, (1, 0))


@pytest.mark.parametrize("always", [False, True])
def test_masks_are_bound_when_they_get_words_and_refreshed_when_they_change(always: bool) -> None:
    inputs = new_inputs(2, always_masked=always)
    bound, binding = bind(inputs)
    binding.take()
    some = np.ones(WORDS, np.int32)
    changed, words = ({}, {"allowed"}), ({"allowed": (2, WORDS)}, set())
    inputs.masks.set(0, some)
    assert changes(inputs, bound, binding) == (changed if always else words)
    inputs.masks.set(0, some)
    inputs.masks.set(1, some)
    assert changes(inputs, bound, binding) == changed
    inputs.masks.clear(0)
    assert changes(inputs, bound, binding) == changed
    inputs.masks.clear(1)
    assert changes(inputs, bound, binding) == (changed if always else ({"allowed": (2, 0)}, set()))


def test_each_binding_gets_the_changes_since_its_own_last_update() -> None:
    inputs = new_inputs(2)
    (first, first_binding), (second, second_binding) = bind(inputs), bind(inputs, slice(1))
    first_binding.take(), second_binding.take()
    inputs.set(0, request())
    assert changes(inputs, first, first_binding) == ({}, ROW)
    inputs.masks.set(0, np.ones(WORDS, np.int32))
    assert changes(inputs, first, first_binding) == ({"allowed": (2, WORDS)}, set())
    assert changes(inputs, second, second_binding) == ({"allowed": (1, WORDS)}, ROW)

"""Memory of in-place caches: layout, growth and lending."""

from __future__ import annotations

import numpy as np
import pytest

from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo, State, key_value_states
from topw_deploy.runtime.cache import buffers as cache_buffers
from topw_deploy.runtime.cache.buffers import Buffers, HostMemory, MemoryPool, allocate_zeros

HEADS, DIMS = (2, 1), (4, 3)


class Host:
    """The part of a session that pools use."""

    memory = HostMemory


RECURRENT = State(layer=1, kind="recurrent", past="past_s", present="present_s", dtype="float16", shape=(2, 3, 5))


def pool(step: int = 0, least: int = 0, more: tuple[State, ...] = (), **sizes: int) -> MemoryPool:
    decoder = DecoderInfo(
        model_type="test",
        kv_form="static",
        num_layers=2,
        states=tuple(
            state
            for layer, (heads, dim) in enumerate(zip(HEADS, DIMS, strict=True))
            for state in key_value_states(layer, "float16", heads, dim, dim)
        )
        + more,
        kv_dtype="float16",
        context_length=1000,
        left_padding=False,
        buffer_step=step,
        buffer_least=least,
    )
    return MemoryPool(Host(), decoder, **sizes)  # type: ignore[arg-type]


def tensors(buffers: Buffers) -> list[np.ndarray]:
    """Views of every state [batch, *shape]."""
    found: list[np.ndarray] = []

    def look(memory: np.ndarray) -> None:
        starts = buffers.layout.offsets(buffers.batch, buffers.length)
        for state, start in zip(buffers.layout.states, starts, strict=False):
            shape = buffers.batch, *state.sized(buffers.length)
            found.append(memory[start : start + 2 * int(np.prod(shape))].view(np.float16).reshape(shape))

    buffers.block.change(look)
    return found


def test_a_buffer_that_grows_is_zeroed_before_it_is_lent_again() -> None:
    lender = pool(step=8)
    buffers = lender.borrow(2, 64, 8)
    for tensor in tensors(buffers):
        tensor[:] = np.nan
    lender.make_room(buffers, 64)
    lender.give_back(buffers)
    again = lender.borrow(1, 30, 20)
    assert not any(tensor.any() for tensor in tensors(again))
    lender.make_room(again, 30)
    assert not any(tensor.any() for tensor in tensors(again))


def test_a_recurrent_state_starts_as_zeros_and_keeps_its_size() -> None:
    lender = pool(step=8, more=(RECURRENT,))
    buffers = lender.borrow(3, 64, 8)
    state = tensors(buffers)[0]
    assert state.shape == (3, 2, 3, 5)
    state[:] = 7
    lender.make_room(buffers, 64)
    assert (tensors(buffers)[0] == 7).all()
    lender.give_back(buffers)
    assert not tensors(lender.borrow(2, 64, 8))[0].any()
    unstepped = pool(more=(RECURRENT,))
    buffers = unstepped.borrow(1, 64, 8)
    tensors(buffers)[0][:] = np.nan
    unstepped.give_back(buffers)
    assert not tensors(unstepped.borrow(1, 64, 8))[0].any()


@pytest.mark.parametrize("step", [0, 256])
def test_buffers_begin_with_the_least_length_that_an_operator_needs(step: int) -> None:
    assert pool(step=step, least=256).borrow(1, 20, 5).length == 256
    assert pool(step=step, least=256, length=20).borrow(1, 20, 5).length == 256


def test_one_block_is_lent_at_a_time_and_the_larger_one_is_kept() -> None:
    lender = pool()
    first, second = lender.borrow(1, 64, 1), lender.borrow(4, 64, 1)
    both = lender.bytes
    assert first.block is not second.block
    lender.give_back(first)
    lender.give_back(second)
    assert lender.bytes == second.block.size < both
    assert lender.borrow(2, 128, 1).block is second.block  # same size, different shape


@pytest.mark.parametrize("size", [1 << 55, 1 << 63, 1 << 70])
def test_impossible_memory_is_refused_in_a_sentence(size: int) -> None:
    with pytest.raises(GenerationError, match=r"the cache would take \d+\.\d TB.*smaller max_length or"):
        HostMemory(size)


@pytest.mark.parametrize("shape", [(1 << 55, 21), (1 << 63, 1), (1 << 80, 21)])
def test_an_impossible_record_is_refused_in_a_sentence(shape: tuple[int, int]) -> None:
    with pytest.raises(
        GenerationError, match=r"the record of the steps would take \d+\.\d TB.*\(max_new_tokens\) at a time"
    ):
        allocate_zeros("the record of the steps", shape, np.uint8)


def test_a_buffer_that_is_cleared_must_fit_the_machine_and_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = pool(step=256)
    monkeypatch.setattr(cache_buffers, "machine_bytes", lambda: 1000)
    with pytest.raises(GenerationError, match=r"GB at once, but this machine has .* GB; open the model with"):
        lender.borrow(1, 64, 1)
    kept = lender.bytes
    monkeypatch.undo()
    assert lender.borrow(1, 64, 1).block.size == lender.bytes == kept


def test_rows_are_copied_and_cleared_alone() -> None:
    buffers = pool(more=(RECURRENT,)).borrow(batch=3, tokens=20, first=20)
    for index, tensor in enumerate(tensors(buffers)):
        tensor[:] = 1 + np.arange(tensor.size).reshape(tensor.shape) % 1000 + index
    before = [tensor.copy() for tensor in tensors(buffers)]
    buffers.copy_row(0, 2, tokens=5)
    for state, old, new in zip(buffers.layout.states, before, tensors(buffers), strict=True):
        np.testing.assert_array_equal(new[:2], old[:2])
        end = 5 if state.grows else None
        np.testing.assert_array_equal(new[2][:, :end], old[0][:, :end])
        if state.grows:
            np.testing.assert_array_equal(new[2][:, 5:], old[2][:, 5:])
    for tokens in (0, 7):
        buffers.clear_row(1, tokens)
        for state, old, new in zip(buffers.layout.states, before, tensors(buffers), strict=True):
            end = tokens if state.grows else None
            np.testing.assert_array_equal(new[1][:, :end], np.zeros_like(old[1][:, :end]))
            if state.grows:
                np.testing.assert_array_equal(new[1][:, end:], old[1][:, end:])
            np.testing.assert_array_equal(new[0], old[0])

"""Memory of in-place caches: what is lent, and what does not fit. Their contents: test_caches.py, test_states.py."""

from __future__ import annotations

import numpy as np
import pytest

from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo, key_value_states
from topw_deploy.runtime.cache import buffers as cache_buffers
from topw_deploy.runtime.cache.buffers import HostMemory, MemoryPool, allocate_zeros


class Host:
    """The part of a session that pools use."""

    memory = HostMemory


def pool(step: int = 0, least: int = 0, **sizes: int) -> MemoryPool:
    decoder = DecoderInfo(
        model_type="test",
        kv_form="static",
        num_layers=1,
        states=key_value_states(0, "float16", 2, 4, 4),
        kv_dtype="float16",
        context_length=1000,
        left_padding=False,
        buffer_step=step,
        buffer_least=least,
    )
    return MemoryPool(Host(), decoder, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 256])
def test_buffers_begin_with_the_least_length_that_an_operator_needs(step: int) -> None:
    assert pool(step=step, least=256).borrow(1, 20, 5).length == 256
    assert pool(step=step, least=256, length=20).borrow(1, 20, 5).length == 256


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
    with pytest.raises(GenerationError, match=r"kB at once, but this machine has .* kB; open the model with"):
        lender.borrow(1, 64, 1)
    kept = lender.bytes
    monkeypatch.undo()
    assert lender.borrow(1, 64, 1).block.size == lender.bytes == kept


def test_one_block_is_lent_at_a_time_and_the_larger_one_is_kept() -> None:
    lender = pool()
    first, second = lender.borrow(1, 64, 1), lender.borrow(4, 64, 1)
    both = lender.bytes
    assert first.block is not second.block
    lender.give_back(first)
    lender.give_back(second)
    assert lender.bytes == second.block.size < both
    assert lender.borrow(2, 128, 1).block is second.block  # same size, different shape

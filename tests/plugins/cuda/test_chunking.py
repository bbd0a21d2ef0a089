"""The first launch's chunks."""

from __future__ import annotations

import ctypes
from itertools import product

import numpy as np
import pytest

GROUPS = 2374  # of 64; vocabulary 151,936
H200 = (132, 4 * 132)
RTX_4090 = (128, 3 * 128)
ORIN = (16, 3 * 16)


def cut(probes: ctypes.CDLL, groups: int, batch: int, device: tuple[int, int], step: int = 16) -> tuple[int, int]:
    """Returns (groups per chunk, chunks per row). device: multiprocessors, resident blocks."""
    found = np.zeros(2, np.int64)
    sizes = [ctypes.c_int64(size) for size in (groups, batch, step, *device)]
    probes.probe_chunks(*sizes, ctypes.c_void_p(found.ctypes.data))
    return int(found[0]), int(found[1])


@pytest.mark.parametrize("device", [H200, RTX_4090, ORIN, (1, 1)])
def test_chunks_are_whole_steps_and_cover_the_row_once(probes: ctypes.CDLL, device: tuple[int, int]) -> None:
    for groups, batch, step in product((1, 15, 16, 17, 500, GROUPS, 8192), (1, 2, 8, 64, 65536), (16, 32)):
        of_chunk, chunks = cut(probes, groups, batch, device, step)
        assert of_chunk % step == 0, (groups, batch)
        assert (chunks - 1) * of_chunk < groups <= chunks * of_chunk, batch


@pytest.mark.parametrize("device", [H200, RTX_4090, ORIN])
def test_no_batch_leaves_a_late_wave_of_few_blocks(probes: ctypes.CDLL, device: tuple[int, int]) -> None:
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 200, 256):
        _, chunks = cut(probes, GROUPS, batch, device)
        blocks, resident = batch * chunks, device[1]
        waves = -(-blocks // resident)
        busy = blocks > 0.5 * resident
        assert busy or chunks == -(-GROUPS // 16), f"batch {batch}: neither busy nor cut into the smallest chunks"
        assert waves == 1 or blocks > (waves - 0.2) * resident, batch


def test_one_row_is_spread_over_the_device(probes: ctypes.CDLL) -> None:
    assert cut(probes, GROUPS, 1, H200) == (16, 149)


def test_a_row_of_its_own_block_is_not_cut_on_a_device_that_is_full_anyway(probes: ctypes.CDLL) -> None:
    assert cut(probes, GROUPS, 10_000, H200)[1] == 1

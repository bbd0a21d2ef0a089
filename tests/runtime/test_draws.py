from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from topw_deploy.runtime.inputs import Draws, uniforms
from topw_deploy.sampling import uniform_for


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
    count=st.integers(1, 9),
)
def test_a_block_equals_the_published_number_of_each_position(seed: int, position: int, count: int) -> None:
    block = uniforms(seed, position, count)
    assert block.dtype == np.float32
    assert block.tolist() == [uniform_for(seed, position + i) for i in range(count)]


def test_rows_keep_their_numbers_over_block_boundaries() -> None:
    rows = [(3, 10), (5, 10), (4, 500)]
    draws = Draws(*zip(*rows, strict=True))
    out = np.zeros(3, np.float32)
    for step in range(600):
        draws.write(step, out)
        if step in (0, 1, 255, 256, 257, 599):
            assert out.tolist() == [uniform_for(seed, length + step) for seed, length in rows]


def test_rows_are_set_and_exchanged_alone() -> None:
    """A row that is set at any step draws for its own positions; so does one that moved."""
    draws, out = Draws([0] * 3, [0] * 3), np.zeros(3, np.float32)
    positions: dict[int, tuple[int, int]] = {}  # row -> (seed, position at step 0)
    for step in range(600):
        if step in (0, 7, 255, 256, 300, 511):
            row = step % 3
            first = draws.begin(row, seed=step, position=999 + step, step=step)
            assert first == uniform_for(step, 999 + step)
            positions[row] = step, 1000
        if step in (100, 400):
            draws.swap(0, 1)
            positions[0], positions[1] = positions[1], positions[0]
        if step == 450:
            draws.clear(2)
            positions.pop(2, None)
        draws.write(step, out)
        for row, (seed, start) in positions.items():
            assert out[row] == uniform_for(seed, start + step), (row, step)

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from topw_deploy.runtime.inputs import Draws, uniforms
from topw_deploy.sampling import uniform_for


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
    sample=st.integers(0, 2**20),
    count=st.integers(1, 9),
)
def test_a_block_equals_the_published_number_of_each_position(
    seed: int, position: int, sample: int, count: int
) -> None:
    block = uniforms(seed, position, sample, count)
    assert block.dtype == np.float32
    assert block.tolist() == [uniform_for(seed, position + i, sample) for i in range(count)]


def test_rows_keep_their_numbers_over_block_boundaries() -> None:
    rows = [(3, 0, 10), (3, 1, 10), (4, 0, 500)]
    draws = Draws(*zip(*rows, strict=True))
    out = np.zeros(3, np.float32)
    for step in range(600):
        draws.write(step, out)
        if step in (0, 1, 255, 256, 257, 599):
            assert out.tolist() == [uniform_for(seed, length + step, sample) for seed, sample, length in rows]


def test_rows_are_set_and_exchanged_alone() -> None:
    """A row that is set at any step draws for its own positions; so does one that moved."""
    draws, out = Draws([0] * 3, [0] * 3, [0] * 3), np.zeros(3, np.float32)
    positions: dict[int, tuple[int, int, int]] = {}  # row -> (seed, sample, position at step 0)
    for step in range(600):
        if step in (0, 7, 255, 256, 300, 511):
            row = step % 3
            first = draws.begin(row, seed=step, sample=2, position=999 + step, step=step)
            assert first == uniform_for(step, 999 + step, 2)
            positions[row] = step, 2, 1000
        if step in (100, 400):
            draws.swap(0, 1)
            positions[0], positions[1] = positions[1], positions[0]
        if step == 450:
            draws.clear(2)
            positions.pop(2, None)
        draws.write(step, out)
        for row, (seed, sample, start) in positions.items():
            assert out[row] == uniform_for(seed, start + step, sample), (row, step)

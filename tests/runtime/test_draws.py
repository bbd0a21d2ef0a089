from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from topw_deploy.runtime.inputs import uniforms
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

"""Shapes of profiles, and choosing one."""

from __future__ import annotations

import pytest

from topw_deploy.errors import TensorRTError
from topw_deploy.manifest import TensorSpec
from topw_deploy.tensorrt.stamp import Profile, Range, find_profile, make_profiles

BOTH = make_profiles("both", max_batch=4, max_sequence=32, max_edits=8)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 1, 0), "decode"),
        ((4, 1, 8), "decode"),
        ((4, 2, 8), "prefill"),
        ((1, 32, 0), "prefill"),
        ((5, 1, 0), None),
        ((1, 33, 0), None),
        ((1, 1, 9), None),
    ],
)
def test_a_run_takes_the_first_profile_that_holds_it(shape: tuple[int, int, int], name: str | None) -> None:
    found = find_profile(BOTH, *shape)
    assert (None if found is None else BOTH[found].name) == name


def test_a_dimension_that_an_engine_cannot_leave_open_is_named() -> None:
    profile = Profile("decode", *[Range(1, 1, 1)] * 3)
    with pytest.raises(TensorRTError, match=r"past_key_values\.0\.key has the dimension 'max_length', for which"):
        profile.shapes(TensorSpec("past_key_values.0.key", "float", ("batch", 2, "max_length", 64)), words=3)

"""Numbers of bytes, read and written."""

from __future__ import annotations

import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.sizes import binary_size, decimal_size, parse_size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1.0 kB"),
        (20_300_000, "20.3 MB"),
        (999_940_000, "999.9 MB"),
        (999_960_000, "1.0 GB"),
        (5_200_000_000, "5.2 GB"),
        (2**60, "1152921.5 TB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_of_at_least_one(size: int, text: str) -> None:
    assert decimal_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"), [(1023, "1023 bytes"), (1024, "1.0 KiB"), (2**20 - 1, "1.0 MiB"), (3 * 2**30, "3.0 GiB")]
)
def test_a_binary_size_is_rounded_before_its_unit_is_chosen(size: int, text: str) -> None:
    assert binary_size(size) == text


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GB", 2**63, "9300000TB"])
def test_a_size_of_2_to_the_63_bytes_or_more_is_refused(size: int | str) -> None:
    with pytest.raises(
        ParameterError, match=r"^the size is .{1,60}, but must be a positive number of bytes below 2\^63"
    ):
        parse_size(size)


def test_more_digits_distinguish_close_sizes() -> None:
    assert (decimal_size(1_204_000_000, 2), decimal_size(1_212_000_000, 2)) == ("1.20 GB", "1.21 GB")

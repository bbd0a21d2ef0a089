"""Quantisation options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.export import export_model
from topw_deploy.export.options import ExportOptions, read_options
from topw_deploy.export.quantise import Quantisation


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"bits": 4, "block_size": 48}, "block_size is 48"),
        ({"bits": 4, "accuracy_level": 5}, "accuracy_level is 5"),
        ({"bits": 8, "table_bits": 4}, "table_bits is 4, but must be 8"),
        ({"bits": 4, "table_bits": 6}, "table_bits is 6, but must be 4"),
        ({"bits": 4, "average_bits": 4}, "average_bits is 4, but must be above 4 and at most 8"),
        ({"bits": 4, "average_bits": float("nan")}, "average_bits is nan"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        Quantisation(**wrong)


@pytest.mark.parametrize(
    ("width", "settings", "size"),
    [
        (64, {"block_size": 32}, 32),
        (64, {"block_size": 128, "symmetric": True}, 64),
        (96, {"block_size": 64, "symmetric": True}, 32),
        (64, {"block_size": 64, "symmetric": False}, 32),  # one block is an odd number of zero points
        (64, {"block_size": 64, "symmetric": False, "bits": 8}, 64),
        (2880, {"block_size": 256, "symmetric": True}, 64),
        (24, {"block_size": 32, "symmetric": True}, None),
        (48, {"block_size": 16, "symmetric": False}, None),
    ],
)
def test_a_tables_block_size_divides_its_rows(width: int, settings: dict[str, Any], size: int | None) -> None:
    assert (
        Quantisation(**{"bits": 4, "table_bits": settings.get("bits", 4), **settings}).table_block_size(width) == size
    )


@pytest.mark.parametrize(
    ("width", "settings", "size"),
    [
        (576, {}, 64),  # 9 blocks of 64 need no padding, 5 of 128 pad 64 weights
        (1536, {}, 128),
        (1536, {"block_size": 32}, 32),
        (576, {"block_size": 256, "symmetric": True}, 64),
        (100, {}, 128),  # one block of 128 takes 548 bits, two of 64 584
    ],
)
def test_a_product_gets_the_block_size_that_takes_the_fewest_bytes(
    width: int, settings: dict[str, Any], size: int
) -> None:
    assert Quantisation(bits=4, **settings).product_block_size(width) == size


def test_the_table_has_8_bits_by_default_also_through_a_manifest() -> None:
    assert Quantisation(bits=4).table_scheme == Quantisation(bits=8)
    assert Quantisation(bits=4, table_bits=4).table_scheme.bits == 4
    made = Quantisation(bits=4, block_size=32)
    assert Quantisation.from_dict(made.as_dict()).table_scheme.bits == 8


def test_a_request_accepts_options_of_quantisation_only_with_a_quantised_dtype() -> None:
    options = read_options(ExportOptions, {"dtype": "int8", "block_size": 64, "symmetric": False})
    assert options.quantisation == Quantisation(bits=8, block_size=64, symmetric=False)
    assert read_options(ExportOptions, {"dtype": "fp16"}).quantisation is None
    with pytest.raises(ParameterError, match="block_size is an option for quantised weights, but dtype is fp32"):
        export_model("m", Path("o"), block_size=64)
    with pytest.raises(ParameterError, match="average_bits is for 4-bit weights, but dtype is int8"):
        export_model("m", Path("o"), dtype="int8", average_bits=6.0)
    with pytest.raises(ParameterError, match="average_bits needs errors measured on a text"):
        export_model("m", Path("o"), dtype="int4", average_bits=6.0, calibration="none")
    with pytest.raises(ParameterError, match="symmetric is False, but TensorRT"):
        export_model("m", Path("o"), dtype="int4", target="tensorrt", symmetric=False)

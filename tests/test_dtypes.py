"""The table of element types agrees with ONNX, NumPy and safetensors."""

from __future__ import annotations

import json
import struct

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save

from topw_deploy.dtypes import ELEMENT_TYPES, FLOATS, SAMPLER_OUTPUT_TYPES, array_name, onnx_name


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_a_type_has_its_number_size_and_names(name: str) -> None:
    kind, known = ELEMENT_TYPES[name], ir.DataType[name.upper()]
    assert (kind.number, kind.bits) == (known.value, known.bitwidth)
    assert kind.numpy == (known.numpy().name if known.numpy().isbuiltin == 1 else "")
    if kind.safetensors:
        file = save({"x": torch.zeros(1, dtype=getattr(torch, known.numpy().name))})
        header = json.loads(file[8 : 8 + struct.unpack("<Q", file[:8])[0]])
        assert header["x"]["dtype"] == kind.safetensors


def test_names_of_arrays_are_those_of_numpy_and_torch() -> None:
    assert [array_name(name) for name in FLOATS] == ["float32", "float16", "bfloat16"]
    assert [onnx_name(array_name(name)) for name in ELEMENT_TYPES] == list(ELEMENT_TYPES)
    assert SAMPLER_OUTPUT_TYPES.keys() >= {"next_token", "keep_mask"}

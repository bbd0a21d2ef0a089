"""Quantized lookups that onnxruntime's CUDA provider computes wrongly are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from msgspec.structs import replace
from onnx import TensorProto, helper

from tests.support.toy_model import Toy, export
from topw_deploy.errors import ManifestError
from topw_deploy.export.write import read_tables
from topw_deploy.manifest import Lookup, load_manifest, save_manifest
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import providers
from topw_deploy.runtime.ort.graph_session import lookup_error_clause
from topw_deploy.sampling import TopWOptions

ROWS = 6


def zeroed(name: str, kind: int, shape: list[int], bits: int) -> TensorProto:
    return helper.make_tensor(name, kind, shape, bytes(math.prod(shape) * bits // 8), raw=True)


def graph(
    *, bits: int = 4, width: int = 64, block: int = 32, zeros: bool = True, kind: int = TensorProto.UINT8,
    as_head: bool = False, blank: bool = False,
) -> bytes:  # fmt: skip
    """A model with one lookup.

    as_head: reshape a tied head's weight.
    blank: zero points are "" instead of omitted.
    """
    in_bytes = kind == TensorProto.UINT8
    blocks = -(-width // block)
    codes = [ROWS, blocks, block * bits // 8] if as_head else [ROWS, width * bits // 8 if in_bytes else width]
    tensors = [
        zeroed("other", TensorProto.FLOAT, [300], 32),
        zeroed("codes", kind, codes, 8 if in_bytes else 4),
        zeroed("scales", TensorProto.FLOAT, [ROWS, blocks], 32),
        zeroed("zeros", TensorProto.UINT8, [ROWS, -(-blocks * bits // 8)], 8),
        zeroed("flat", TensorProto.INT64, [2], 64),
    ]
    nodes = [helper.make_node("Reshape", ["codes", "flat"], ["table"])] if as_head else []
    inputs = ["table" if as_head else "codes", "ids", "scales"] + (["zeros"] if zeros else [""] if blank else [])
    nodes.append(
        helper.make_node(
            "GatherBlockQuantized", inputs, ["rows"], domain="com.microsoft", bits=bits, block_size=block,
            gather_axis=0, quantize_axis=1,
        )
    )  # fmt: skip
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [None])
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)
    return bytes(helper.make_model(helper.make_graph(nodes, "g", [ids], [rows], tensors)).SerializeToString())


def found(tmp_path: Path, model: bytes) -> list[Lookup]:
    (tmp_path / "model.onnx").write_bytes(model)
    return list(read_tables(tmp_path)[1])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, Lookup(32, 64, True)),
        ({"zeros": False}, Lookup(32, 64, False)),
        ({"zeros": False, "blank": True}, Lookup(32, 64, False)),
        ({"bits": 8, "block": 16, "width": 40}, Lookup(16, 40, True)),
        ({"as_head": True}, Lookup(32, 64, True)),
        ({"as_head": True, "bits": 8, "zeros": False}, Lookup(32, 64, False)),
        ({"kind": TensorProto.UINT4}, None),
        ({"kind": TensorProto.INT4, "zeros": False}, None),
    ],
)
def test_lookups_in_tables_of_bytes_are_read_from_the_file(
    tmp_path: Path, settings: dict[str, Any], wanted: Lookup | None
) -> None:
    assert found(tmp_path, graph(**settings)) == ([] if wanted is None else [wanted])


def test_a_graph_without_such_a_lookup_has_none(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["table", "ids"], ["rows"])
    table = helper.make_tensor("table", TensorProto.UINT8, [2, 2], bytes(4), raw=True)
    model = helper.make_model(helper.make_graph([node], "GatherBlockQuantized", [], [], [table]))
    assert found(tmp_path, model.SerializeToString()) == []


@pytest.mark.parametrize(
    ("lookup", "version", "words"),
    [
        (Lookup(32, 64, False), "1.28.0", r"without zero points, which onnxruntime 1\.28\.0 reads wrongly on CUDA"),
        (Lookup(32, 64, False), "1.29.0", ""),
        (Lookup(32, 64, False), "2.0.0", ""),
        (Lookup(64, 96, True), "1.31.1", "rows of 96 weights in blocks of 64, which"),
        (Lookup(16, 40, False), "1.31.1", "rows of 40 weights in blocks of 16"),
    ],
)
def test_each_version_has_its_defects(lookup: Lookup, version: str, words: str) -> None:
    said = lookup_error_clause(lookup, version)
    assert re.search(words, said)
    assert bool(said) == bool(words)


def test_only_a_session_on_cuda_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export(tmp_path / "toy", Toy.random(1, options=TopWOptions(top_m=64, metric="uniform")))
    save_manifest(folder, replace(load_manifest(folder), lookups=(Lookup(64, 96, True),)))
    TopWModel.from_pretrained(folder, provider="cpu")
    monkeypatch.setattr(providers, "check_used", lambda *_: providers.CUDA)
    with pytest.raises(
        ManifestError, match=rf"looks embeddings up in rows of 96 .*{ort.__version__} .*again, or use provider='cpu'\."
    ):
        TopWModel.from_pretrained(folder, provider="cpu")

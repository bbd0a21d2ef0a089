"""Other exporters' decoders that must be refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from tests.attacks.test_folders import APPENDED, Change, add_node, set_shape
from tests.support.attacks import call, function, refused, sparse
from topw_deploy.errors import SourceError, TopWError, UnsupportedModelError
from topw_deploy.export import export_model

pytestmark = pytest.mark.slow


def move_weight(**fields: str) -> Change:
    """Change where the largest weight is said to be."""

    def change(model: onnx.ModelProto) -> None:
        tensor = max(
            (each for each in model.graph.initializer if each.data_location == TensorProto.EXTERNAL),
            key=lambda each: each.dims[0],
        )
        for name, value in fields.items():
            for entry in [entry for entry in tensor.external_data if entry.key == name]:
                tensor.external_data.remove(entry)
            tensor.external_data.add(key=name, value=value)

    return change


def add_external_constant(location: str) -> Change:
    """A Constant node whose value is in another file."""

    def change(model: onnx.ModelProto) -> None:
        value = TensorProto(name="c", dims=[4], data_type=1, data_location=TensorProto.EXTERNAL)
        value.external_data.add(key="location", value=location)
        node = model.graph.node.add(op_type="Constant", output=["attacker"])
        attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
        attribute.t.CopyFrom(value)

    return change


GRAPHS: dict[str, tuple[Change, str]] = {
    "data above the folder": (move_weight(location="../secret"), "keeps weights at '../secret', outside its folder"),
    "data at an absolute path": (
        move_weight(location="/etc/passwd"),
        "keeps weights at '/etc/passwd', outside its folder",
    ),
    "data in a device": (move_weight(location="zero"), "needs the data file zero, which is missing"),
    "data that is not there": (move_weight(location="gone"), "needs the data file gone, which is missing"),
    "data before the file": (move_weight(offset="-8"), "cannot be read as ONNX|bytes at offset -8 of model.onnx.data"),
    "data beyond the file": (
        move_weight(offset=str(1 << 40)),
        "bytes at offset 1099511627776 of model.onnx.data, which has",
    ),
    "less data than the shape needs": (move_weight(length="4"), "in 4 bytes at offset"),
    "a shape that overflows": (
        set_shape(1 << 32, 1 << 32, 1 << 32, external=True),
        "cannot be read as ONNX|keeps the .* bytes",
    ),
    "a constant in another file": (
        add_external_constant("/etc/passwd"),
        "keeps an attribute of the node 'Constant' in another file",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_outside_their_file_are_refused(decoder: Path, name: str) -> None:
    change, reason = GRAPHS[name]
    model = onnx.load(decoder / "model.onnx", load_external_data=False)
    change(model)
    (decoder / "model.onnx").write_bytes(model.SerializeToString())
    (decoder / "zero").symlink_to("/dev/zero")
    expect_refusal(decoder, SourceError, reason)


def test_a_data_file_whose_name_is_not_utf_8_is_refused(decoder: Path) -> None:
    path = decoder / "model.onnx"
    path.write_bytes(path.read_bytes().replace(b"model.onnx.data", b"model.onnx.dat\xff"))
    expect_refusal(decoder, SourceError, r"needs the data file b'model.onnx.dat")


@pytest.mark.parametrize("name", [name for name in APPENDED if "function" not in name])
def test_an_endless_graph_is_refused(decoder: Path, name: str) -> None:
    path = decoder / "model.onnx"
    path.write_bytes(path.read_bytes() + APPENDED[name])
    expect_refusal(decoder, SourceError, "cannot be read as ONNX")


@pytest.mark.parametrize("functions", [function("f", ["f"]), function("f", ["g"]) + function("g", ["f"])])
def test_functions_that_call_each_other_are_refused(decoder: Path, functions: bytes) -> None:
    path = decoder / "model.onnx"
    path.write_bytes(path.read_bytes() + functions + call("f"))
    expect_refusal(decoder, UnsupportedModelError, "the function evil.f calls itself")


@pytest.mark.long
def test_an_unknown_operator_is_refused(decoder: Path) -> None:
    model = onnx.load(decoder / "model.onnx", load_external_data=False)
    add_node("Run", "evil")(model)
    (decoder / "model.onnx").write_bytes(model.SerializeToString())
    expect_refusal(decoder, TopWError, "evil", verify=True)


@pytest.mark.parametrize("name", ["config.json", "genai_config.json"])
def test_a_configuration_that_is_a_bomb_is_refused(decoder: Path, name: str) -> None:
    (decoder / name).write_text("[" * 1_000_000)
    expect_refusal(decoder, SourceError, rf"{name} cannot be read as JSON")
    sparse(decoder / name, 1 << 40)
    expect_refusal(decoder, SourceError, rf"{name} cannot be read as JSON .*it has more than 16777216 bytes")


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "a\0b"])
def test_a_graph_named_outside_the_folder_is_not_opened(decoder: Path, name: str) -> None:
    """genai_config.json may name the decoder's file."""
    from topw_deploy.export.source.resolve import resolve

    (decoder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": name}}}))
    assert resolve(str(decoder)).onnx == decoder / "model.onnx"


def expect_refusal(decoder: Path, kind: type[TopWError], reason: str, verify: bool = False) -> None:
    output = decoder.parent / "out"
    with refused(kind, reason):
        export_model(decoder, output, verify=verify)
    assert sorted(path.name for path in decoder.parent.iterdir()) == [decoder.name]

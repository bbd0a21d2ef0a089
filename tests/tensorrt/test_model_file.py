"""The reader of ONNX files agrees with onnx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.toy_model import Toy, export
from topw_deploy.errors import TensorRTError
from topw_deploy.onnx_file.model import Graph, Node
from topw_deploy.tensorrt.model_file import read_model, without_function


def flat(graph: Graph) -> list[Node]:
    return [each for node in graph.nodes for each in (node, *(n for g in node.subgraphs.values() for n in flat(g)))]


def flat_protos(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [
        each
        for node in nodes
        for each in (node, *(n for a in node.attribute if a.HasField("g") for n in flat_protos(list(a.g.node))))
    ]


def assert_same_nodes(mine: list[Node], theirs: list[onnx.NodeProto]) -> None:
    assert len(mine) == len(theirs)
    for node, proto in zip(mine, theirs, strict=True):
        assert (node.op_type, node.domain, node.name) == (proto.op_type, proto.domain, proto.name)
        assert (list(node.inputs), list(node.outputs)) == (list(proto.input), list(proto.output))
        for attribute in proto.attribute:
            if attribute.type in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT):
                assert node.attributes[attribute.name] == helper.get_attribute_value(attribute)
            if attribute.type == onnx.AttributeProto.STRING:
                assert node.attributes[attribute.name] == attribute.s.decode()
            if attribute.type == onnx.AttributeProto.INTS:
                assert node.attributes[attribute.name] == (tuple(attribute.ints) or None)


def test_an_exported_graph_reads_as_onnx_reads_it(exported_toy: Path) -> None:
    proto, model = onnx.load(exported_toy / "model.onnx"), read_model(exported_toy / "model.onnx")
    assert model.opsets == {each.domain: each.version for each in proto.opset_import}
    assert_same_nodes(flat(model.graph), flat_protos(list(proto.graph.node)))
    (function,) = proto.functions
    body = model.functions["topw", "TopWSample"]
    assert_same_nodes(flat(body), flat_protos(list(function.node)))
    assert [value.name for value in body.inputs] == list(function.input)
    for mine, theirs in zip(model.graph.inputs, proto.graph.input, strict=True):
        dims = [dim.dim_value or dim.dim_param for dim in theirs.type.tensor_type.shape.dim]
        assert (mine.name, list(mine.shape or ())) == (theirs.name, dims)
    for tensor in proto.graph.initializer:
        constant = model.graph.constants[tensor.name]
        assert constant.shape == tuple(tensor.dims)
        if tensor.data_type == TensorProto.INT64 and 0 < numpy_helper.to_array(tensor).size <= 8:
            assert constant.numbers == tuple(numpy_helper.to_array(tensor).ravel())


def test_small_integers_are_read_however_they_are_stored(tmp_path: Path) -> None:
    listed = helper.make_tensor("listed", TensorProto.INT64, [2], [-1, 2**40])
    raw = numpy_helper.from_array(np.array([7], np.int32), "raw")
    large = numpy_helper.from_array(np.arange(100), "large")
    graph = helper.make_graph([], "g", [], [], [listed, raw, large])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    constants = read_model(tmp_path / "model.onnx").graph.constants
    assert [constants[name].numbers for name in ("listed", "raw", "large")] == [(-1, 2**40), (7,), None]


def test_taking_a_function_out_changes_no_other_byte(exported_toy: Path) -> None:
    path = exported_toy / "model.onnx"
    before = path.read_bytes()
    without = without_function(path, "topw", "TopWSample")
    proto = onnx.load_from_string(before)
    del proto.functions[:]
    assert without == proto.SerializeToString()
    assert path.read_bytes() == before


def test_removing_a_function_that_is_not_there_changes_no_byte(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(2))
    path = folder / "model.onnx"
    assert without_function(path, "topw", "Other") == path.read_bytes()


@pytest.mark.parametrize("data", [b"", b"\x08\x08", b"\x3a\xff\xff\xff\xff\x7f", b"\xff" * 20, b"not a model"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(TensorRTError, match=r"model\.onnx"):
        read_model(path)


def test_a_file_that_is_cut_short_is_refused_or_read_and_never_crashes(exported_toy: Path, tmp_path: Path) -> None:
    data = (exported_toy / "model.onnx").read_bytes()
    path = tmp_path / "model.onnx"
    refused = 0
    for end in range(1, len(data), len(data) // 60):
        path.write_bytes(data[:end])
        try:
            read_model(path)
        except TensorRTError:
            refused += 1
    assert refused > 50  # a cut between top-level fields leaves a valid model

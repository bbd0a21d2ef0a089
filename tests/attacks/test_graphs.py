"""Graphs that the reader of ONNX files must refuse."""

from __future__ import annotations

import pytest

from tests.support.attacks import field, nested_if, varint
from topw_deploy.onnx_file import model
from topw_deploy.onnx_file.model import read_graph
from topw_deploy.onnx_file.protobuf import ProtobufError

UNREAD: dict[str, tuple[bytes, str]] = {
    "If within If": (nested_if(2000), "nested more than 64 deep"),
    "many empty nodes": (field(7, field(1, b"") * 1100), "more than 1000 nodes, values and numbers"),
    "a tensor of many axes": (field(7, field(5, field(1, b"\1" * 1100))), "more than 1000 nodes"),
    "an attribute of many numbers": (
        field(7, field(1, field(5, field(1, b"axes") + field(8, b"\1" * 1100)))),
        "more than 1000 nodes",
    ),
    "a text where a graph is": (field(7, b"\x0a\xff"), "."),
    "a number where a graph is": (varint(7 << 3) + varint(5), "."),
    "groups": (b"\x3b\x3c", "a field of kind 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_is_not_a_graph_or_exceeds_a_limit_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller bound on what a file may have, so that the test is short."""
    monkeypatch.setattr(model, "_MOST_PARTS", 1000)
    content, reason = UNREAD[name]
    with pytest.raises(ProtobufError, match=reason):
        read_graph(memoryview(content))

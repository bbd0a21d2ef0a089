"""Graphs that `topw check` and the builder of engines, which read them without onnxruntime, must refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.attacks import call, field, function, nested_if, put, refused, varint
from topw_deploy.errors import TensorRTError
from topw_deploy.onnx_file import model
from topw_deploy.tensorrt import check as check_module
from topw_deploy.tensorrt.check import check
from topw_deploy.tensorrt.model_file import read_model


def doubling(levels: int) -> bytes:
    """Functions that stand for 2 ** levels nodes."""
    return b"".join(function(f"f{level}", [f"f{level + 1}"] * 2) for level in range(levels)) + function(
        f"f{levels}", []
    )


UNREAD: dict[str, tuple[bytes, str]] = {
    "If within If": (nested_if(2000), "nested more than 64 deep"),
    "many empty nodes": (field(7, field(1, b"") * 1100), "more than 1000 nodes, values and numbers"),
    "a tensor of many axes": (field(7, field(5, field(1, b"\1" * 1100))), "more than 1000 nodes"),
    "an attribute of many numbers": (
        field(7, field(1, field(5, field(1, b"axes") + field(8, b"\1" * 1100)))),
        "more than 1000 nodes",
    ),
    "many functions": (field(25, b"") * 1100 + field(7, b""), "more than 1000 nodes"),
    "a text where a graph is": (field(7, b"\x0a\xff"), "is not an ONNX model"),
    "a number where a graph is": (varint(7 << 3) + varint(5), "is not an ONNX model"),
    "groups": (b"\x3b\x3c", "a field of kind 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_that_is_not_a_graph_or_exceeds_a_limit_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller bound on what a file may have, so that the test is short."""
    monkeypatch.setattr(model, "_MOST_PARTS", 1000)
    content, reason = UNREAD[name]
    (tmp_path / "model.onnx").write_bytes(content)
    with refused(TensorRTError, reason):
        read_model(tmp_path / "model.onnx")


CHECKED: dict[str, tuple[bytes, str]] = {
    "functions that double": (doubling(12) + call("f0"), "has more than 1000 nodes"),
    "a chain of functions": (
        b"".join(function(f"f{level}", [f"f{level + 1}"]) for level in range(40)) + call("f0"),
        "call each other more than 16 deep",
    ),
    "a function that calls itself": (function("f", ["f"]) + call("f"), "the function evil.f calls itself"),
    "two functions that call each other": (
        function("f", ["g"]) + function("g", ["f"]) + call("f"),
        "the function evil.f calls itself",
    ),
    "a constant without outputs": (field(7, field(1, field(4, b"Constant"))), "a node that is not valid in ONNX"),
    "a cast to a text": (
        field(
            7, field(1, field(1, b"x") + field(4, b"Cast") + field(5, field(1, b"to") + field(4, b"z")))
        ),
        "a node that is not valid in ONNX",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_functions_that_call_themselves_or_expand_too_far_are_refused(
    folder: Path, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "_MOST_NODES", 1000)
    content, reason = CHECKED[name]
    put(folder, "model.onnx", (folder / "model.onnx").read_bytes() + content)
    with refused(TensorRTError, reason):
        check(folder, target, ask=False)

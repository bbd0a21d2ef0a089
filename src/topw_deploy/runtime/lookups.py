"""Quantised embedding lookups that onnxruntime's CUDA provider computes wrongly, without an error.

Its `GatherBlockQuantized` over a uint8 table reads the wrong weights

- before 1.24 where two weights share a byte (int4);
- before 1.29 where there are no zero points: it subtracts 0 from a code, the CPU provider 2 ** (bits - 1);
- up to 1.31, and perhaps later, where a row ends within a block: it takes the scales of other rows.

The exporter writes tables with zero points and whole blocks. Folders of other tools, and older ones of its own, may not
have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnxruntime as ort

from topw_deploy.errors import ManifestError
from topw_deploy.files import mapped
from topw_deploy.runtime import providers
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.graph_file import Initializer, Node, read_graph

_OPERATOR = "GatherBlockQuantized"
_UINT8 = 2  # TensorProto.DataType
_ZERO_POINTS = 3  # input of the operator
_READS_PAIRS = (1, 24)  # the first version that reads two weights of a byte
_TAKES_MIDDLE = (1, 29)  # the first version with the CPU's default zero point


@dataclass(frozen=True)
class Lookup:
    """A lookup in a uint8 table. width: weights in a row."""

    bits: int
    block_size: int
    width: int
    has_zero_points: bool


def check(folder: ModelFolder, provider: str) -> None:
    """Raises ManifestError for a lookup in `folder` that `provider`, by its full name, computes wrongly.

    The graph must be one that onnxruntime has opened.
    """
    if providers.device_of(provider) != "cuda":
        return
    for lookup in lookups(folder):
        if found := complaint(lookup, ort.__version__):
            raise ManifestError(f"{folder.path} looks embeddings up in {found}, or use provider='cpu'.", "provider")


def complaint(lookup: Lookup, version: str) -> str:
    """What CUDA in onnxruntime `version` does wrong with `lookup` and a remedy, as a clause; "" for nothing."""
    known = tuple(int(part) for part in version.split(".")[:2])
    wrongly = f"which onnxruntime {version} reads wrongly on CUDA"
    again = "export the original model again"
    if lookup.bits < 8 and known < _READS_PAIRS:
        return f"a table of {lookup.bits} bits, {wrongly}; export with --dtype int8 or fp16, install 1.24 or newer"
    if not lookup.has_zero_points and known < _TAKES_MIDDLE:
        return f"a quantised table without zero points, {wrongly}; {again}, install 1.29 or newer"
    if lookup.width % lookup.block_size:
        size = f"rows of {lookup.width} weights in blocks of {lookup.block_size}"
        return f"{size}, {wrongly}; {again}"
    return ""


def lookups(folder: ModelFolder) -> list[Lookup]:
    """The lookups in uint8 tables in the graph of `folder`."""
    with mapped(folder.model) as file:
        if file.find(_OPERATOR.encode()) < 0:
            return []
        nodes, initializers = read_graph(file)
    made_by = {name: node for node in nodes for name in node.outputs}
    found = (_lookup(node, made_by, initializers) for node in nodes if node.operator == _OPERATOR)
    return [lookup for lookup in found if lookup is not None]


def _lookup(node: Node, made_by: dict[str, Node], initializers: dict[str, Initializer]) -> Lookup | None:
    name = node.inputs[0]
    while name in made_by and made_by[name].operator == "Reshape":  # of the tied head's weight [rows, blocks, bytes]
        name = made_by[name].inputs[0]
    table = initializers.get(name)
    if table is None or table.dtype != _UINT8:
        return None
    bits = node.integers.get("bits", 4)
    return Lookup(
        bits=bits,
        block_size=node.integers.get("block_size", 128),
        width=math.prod(table.shape[1:]) * 8 // bits,
        has_zero_points=len(node.inputs) > _ZERO_POINTS and bool(node.inputs[_ZERO_POINTS]),
    )

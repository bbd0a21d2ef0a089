"""Which nodes of a session onnxruntime left on the CPU, though another provider was asked for.

onnxruntime itself keeps arithmetic on shapes and indices on the CPU on purpose: it is a few numbers, and on a device
they would have to be waited for. Any other operator there makes tensors cross between device and host in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnxruntime as ort

from topw_deploy.errors import ProviderError
from topw_deploy.runtime.providers import CPU, short_name

_RECORD = "session.record_ep_graph_assignment_info"  # onnxruntime 1.24 and newer

# What shapes and indices are computed with. A larger tensor may go through these too, and is not told apart: but every
# provider for devices has them for all types, so they are on the CPU by choice.
# fmt: off
_ON_SHAPES = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg",
    "Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice",
    "Split", "Squeeze", "Sub", "Unsqueeze", "Where",
))
# fmt: on

_HINTS = {
    "GroupQueryAttention": "onnxruntime has it for CUDA in float16 and bfloat16: export with --dtype fp16, or, for "
    "int4 and int8, with --compute-dtype fp16",
    "TopWSample": "the library of the native sampler is not for this provider: see `topw doctor`",
}


@dataclass(frozen=True)
class CpuNode:
    """A node on the CPU: its name in the graph, its operator, and whether that does more than arithmetic on shapes."""

    name: str
    operator: str
    computes: bool


def reported() -> bool:
    """Whether this onnxruntime reports where the nodes of a session are (1.24 and newer)."""
    return hasattr(ort.InferenceSession, "get_provider_graph_assignment_info")


def record(options: ort.SessionOptions) -> None:
    """Have sessions opened with `options` remember where their nodes are."""
    try:
        recorded = options.get_session_config_entry(_RECORD) == "1"
    except Exception:  # noqa: BLE001  # onnxruntime's way of saying that there is none
        recorded = False
    if not recorded:
        options.add_session_config_entry(_RECORD, "1")


def cpu_nodes(session: ort.InferenceSession) -> tuple[CpuNode, ...]:
    """The nodes of a session, opened after `record`, that its CPU provider runs; subgraphs are not looked into."""
    return tuple(
        CpuNode(node.name, node.op_type, bool(node.domain) or node.op_type not in _ON_SHAPES)
        for group in session.get_provider_graph_assignment_info()
        if group.ep_name == CPU
        for node in group.get_nodes()
    )


def cpu_nodes_in(profile: Sequence[tuple[str, str, str]]) -> tuple[CpuNode, ...]:
    """The same from (name, operator, provider) of the nodes that a run went through."""
    return tuple(CpuNode(name, kind, kind not in _ON_SHAPES) for name, kind, provider in profile if provider == CPU)


def complaint(nodes: Sequence[CpuNode], provider: str) -> str:
    """What is wrong with computing nodes on the CPU, as a sentence without an end; empty where there are none."""
    computing = [node for node in nodes if node.computes]
    if not computing:
        return ""
    counts = Counter(node.operator for node in computing)
    kinds = ", ".join(f"{count} {operator}" for operator, count in counts.most_common(6))
    names = ", ".join(node.name or "unnamed" for node in computing[:3])
    hints = "; ".join(_HINTS[operator] for operator in counts if operator in _HINTS)
    more = ", ..." if len(computing) > 3 else ""
    said = f"{short_name(provider)} leaves {len(computing)} nodes to the CPU: {kinds} ({names}{more})"
    return f"{said}; {hints}" if hints else said


def check(nodes: Sequence[CpuNode], provider: str) -> None:
    """Raises ProviderError, which names them, for nodes that compute on the CPU."""
    what = complaint(nodes, provider)
    if what:
        raise ProviderError(
            f"{what}; pass allow_fallback=True to accept that, or use provider='cpu'.", "allow_fallback", "provider"
        )

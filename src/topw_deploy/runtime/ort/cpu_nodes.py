"""Find the nodes that onnxruntime left on the CPU.

Only arithmetic on shapes and indices belongs there; any other operator on the CPU would transfer tensors in every step.
Before 1.24, onnxruntime reports the providers of nodes only in the profile of a run.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from topw_deploy.errors import ProviderError
from topw_deploy.runtime.ort.providers import CPU, short_name
from topw_deploy.runtime.protocols import CpuNode

_RECORD_ASSIGNMENTS = "session.record_ep_graph_assignment_info"  # onnxruntime >= 1.24
_KERNEL_TIME = "_kernel_time"  # at the end of a node's name in profiles

# Arithmetic on shapes and indices. Every device provider has these operators, so their place on the CPU is intended.
# fmt: off
_SHAPE_OPERATORS = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg",
    "Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice",
    "Split", "Squeeze", "Sub", "Unsqueeze", "Where",
))
# fmt: on

_HINTS = {
    "GroupQueryAttention": "onnxruntime has it for CUDA in float16 and bfloat16: export with --dtype fp16, or, for "
    "int4 and int8, with --compute-dtype fp16",
    "TopWSample": "the library of the native sampler does not support this provider: see `topw doctor`",
}


def reports_assignments() -> bool:
    """Whether onnxruntime reports the nodes' providers without a run, as it does from 1.24 on."""
    return hasattr(ort.InferenceSession, "get_provider_graph_assignment_info")


def record_assignments(options: ort.SessionOptions) -> RunProfile | None:
    """Make sessions of `options` record the provider of each node. Returns a RunProfile if this needs a run."""
    if not reports_assignments():
        return RunProfile(options)
    try:
        recorded = options.get_session_config_entry(_RECORD_ASSIGNMENTS) == "1"
    except Exception:  # noqa: BLE001  # missing entry
        recorded = False
    if not recorded:
        options.add_session_config_entry(_RECORD_ASSIGNMENTS, "1")
    return None


def assigned_cpu_nodes(session: ort.InferenceSession) -> tuple[CpuNode, ...]:
    """The nodes of a session on the CPU, without those of subgraphs. Call `record_assignments` before opening it."""
    return tuple(
        CpuNode(node.name, node.op_type, bool(node.domain) or node.op_type not in _SHAPE_OPERATORS)
        for group in session.get_provider_graph_assignment_info()
        if group.ep_name == CPU
        for node in group.get_nodes()
    )


class RunProfile:
    """Profiles the next session that is opened with `options`."""

    def __init__(self, options: ort.SessionOptions) -> None:
        folder = tempfile.mkdtemp(prefix="topw-")
        self._delete_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._options = options
        self._previous_settings = options.enable_profiling, options.profile_file_prefix
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "run")

    def restore(self) -> None:
        """Restore the options after the session was opened."""
        self._options.enable_profiling, self._options.profile_file_prefix = self._previous_settings

    def nodes(self, raw: ort.InferenceSession) -> list[tuple[str, str, str]]:
        """End the profile. Returns (name, operator, provider) of each node that ran.

        raw: the profiled session.
        """
        events = json.loads(Path(raw.end_profiling()).read_text(encoding="utf-8"))
        self._delete_folder()
        found = [event for event in events if event.get("args", {}).get("provider")]
        return list(dict.fromkeys(_event_node(event) for event in _outermost_events(found)))


def profiled_cpu_nodes(profile: Sequence[tuple[str, str, str]]) -> tuple[CpuNode, ...]:
    """The nodes on the CPU. profile: of `RunProfile.nodes`."""
    return tuple(
        CpuNode(name, kind, kind not in _SHAPE_OPERATORS) for name, kind, provider in profile if provider == CPU
    )


def _outermost_events(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events that are not within another one, as those of an If's branches are within that of the If."""
    end = -1
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end or event["ts"] + event["dur"] > end:
            end = event["ts"] + event["dur"]
            yield event


def _event_node(event: dict[str, Any]) -> tuple[str, str, str]:
    return event["name"].removesuffix(_KERNEL_TIME), event["args"]["op_name"], event["args"]["provider"]


def cpu_nodes_clause(nodes: Sequence[CpuNode], provider: str) -> str:
    """A clause that names the nodes that compute on the CPU; "" if none does."""
    computing = [node for node in nodes if node.computes]
    if not computing:
        return ""
    counts = Counter(node.operator for node in computing)
    kinds = ", ".join(f"{count} {operator}" for operator, count in counts.most_common(6))
    names = ", ".join(node.name or "unnamed" for node in computing[:3])
    hints = "; ".join(_HINTS[operator] for operator in counts if operator in _HINTS)
    more = ", ..." if len(computing) > 3 else ""
    clause = f"{short_name(provider)} leaves {len(computing)} nodes on the CPU: {kinds} ({names}{more})"
    return f"{clause}; {hints}" if hints else clause


def refuse_cpu_nodes(nodes: Sequence[CpuNode], provider: str) -> None:
    """Raises ProviderError if one of the nodes computes on the CPU."""
    clause = cpu_nodes_clause(nodes, provider)
    if clause:
        raise ProviderError(
            f"{clause}; pass allow_fallback=True to accept that, or use provider='cpu'.", "allow_fallback", "provider"
        )

"""Every node of an exported graph, sorted by what a target does with it, before anything is built.

Verdicts: `native`, the target has the operator; `plugin`, the sampler's node, which a plugin (TensorRT) or a native
operator (onnxruntime) of this package answers; `inlined`, a node of a function that stands in for its caller;
`unsupported`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from topw_deploy.errors import EngineError, ParameterError, PluginError
from topw_deploy.manifest import TARGETS, load_manifest
from topw_deploy.plugins.tensorrt import tensorrt_module
from topw_deploy.plugins.tensorrt.node import INPUTS, TABLE_INPUTS, NodeSettings
from topw_deploy.tensorrt import operators
from topw_deploy.tensorrt.advice import next_step
from topw_deploy.tensorrt.ask import ParserAnswer, ask_parser
from topw_deploy.tensorrt.onnx_file import Model, Node, read_model
from topw_deploy.tensorrt.operators import Scope
from topw_deploy.tensorrt.walk import walk

MODEL = "model.onnx"
SAMPLER = ("topw", "TopWSample")
TABLE_AT = len(INPUTS) + TABLE_INPUTS.index("table")
VERDICTS = ("native", "plugin", "inlined", "unsupported")

_NAMES = {"tensorrt": "TensorRT", "onnxruntime": "onnxruntime"}
_ONNXRUNTIME_SINCE = {"GroupQueryAttention": (1, 23), "Attention": (1, 23), "TensorScatter": (1, 26)}
_WINDOWS_SINCE = (1, 24)  # before, GroupQueryAttention made them a token too long
Refusal = Callable[[Node, Scope], str | None]


@dataclass(frozen=True)
class NodeVerdict:
    """One node. where: "graph", or the function that it stands in. verdict: of VERDICTS. reason: a clause, empty where
    there is nothing to say."""

    name: str
    operator: str
    where: str
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What became of a folder. needs: the oldest version of the target that has all operators, "" for any.
    objections: what stands against the graph as a whole. parser: what TensorRT's own parser says; None where it was not
    asked, and `not_asked` says why. next_step: what to do now."""

    folder: str
    target: str
    nodes: tuple[NodeVerdict, ...]
    needs: str
    objections: tuple[str, ...]
    parser: ParserAnswer | None
    not_asked: str
    next_step: str

    @property
    def unsupported(self) -> tuple[NodeVerdict, ...]:
        return tuple(node for node in self.nodes if node.verdict == "unsupported")

    @property
    def passed(self) -> bool:
        """Whether nothing stands against building the graph for the target."""
        refused = self.parser is not None and not self.parser.takes and not self.needs_plugin
        return not self.unsupported and not self.objections and not refused

    @property
    def needs_plugin(self) -> bool:
        """Whether the sampler's function cannot stand in for the plugin."""
        return any(node.verdict == "plugin" and node.reason for node in self.nodes)


def check(out: Path, target: str, *, ask: bool = True) -> Report:
    """Read the graph of an exported folder and sort its nodes for `target`, of manifest.TARGETS.

    ask: whether TensorRT's parser is asked too, where its module is installed.
    Raises ManifestError, EngineError where the graph cannot be read, ParameterError for an unknown target.
    """
    if target not in TARGETS:
        raise ParameterError(f"target is {target!r}, but must be one of {', '.join(TARGETS)}.", "target")
    manifest = load_manifest(out)
    model = read_model(out / MODEL)
    nodes = tuple(sort_nodes(model, target))
    parser, not_asked = _asked(out / MODEL) if ask and target == "tensorrt" else (None, "not wanted")
    needs, objections = _needs(model, target), tuple(_objections(model, target))
    report = Report(str(out), target, nodes, needs, objections, parser, not_asked if parser is None else "", "")
    return replace(report, next_step=next_step(report.passed, report.needs_plugin, nodes, target, manifest, out))


def sort_nodes(model: Model, target: str) -> Iterator[NodeVerdict]:
    """A verdict for every node of the graph and of the functions that it calls."""
    refusal: Refusal = operators.refusal if target == "tensorrt" else _onnxruntime_refusal
    for node, scope in walk(model.graph):
        if (node.domain, node.op_type) == SAMPLER:
            yield from _sampler(node, scope, model, refusal)
        elif (node.domain, node.op_type) in model.functions:
            yield NodeVerdict(node.name, node.operator, "graph", "inlined")
            yield from _inlined(node, scope, model, refusal)
        else:
            yield _verdict(node, "graph", refusal(node, scope), "native")


def _sampler(node: Node, scope: Scope, model: Model, refusal: Refusal) -> Iterator[NodeVerdict]:
    """The plugin where it is registered, else the function; where one of them is refused, the other alone."""
    body = model.functions.get(SAMPLER)
    inlined = list(_inlined(node, scope, model, refusal)) if body is not None else []
    refused = [each for each in inlined if each.verdict == "unsupported"]
    unserved = _plugins_refusal(node, scope) if refusal is operators.refusal else None
    if body is not None and not refused:
        verdict, reason = (
            ("plugin", "") if unserved is None else ("inlined", f"the plugin does not serve it: {unserved}")
        )
        yield NodeVerdict(node.name, node.operator, "graph", verdict, reason)
        yield from inlined
        return
    reason = f"its function has {refused[0].operator}: {refused[0].reason}" if refused else "its function is not there"
    if unserved is not None:
        reason += f"; and the plugin does not serve it: {unserved}"
    yield NodeVerdict(node.name, node.operator, "graph", "plugin" if unserved is None else "unsupported", reason)


def _plugins_refusal(node: Node, scope: Scope) -> str | None:
    """Why TensorRT's plugin does not take the node, as a clause."""
    try:
        settings = NodeSettings.from_fields(dict(node.attributes))
    except PluginError as error:
        return str(error).partition(";")[0].rstrip(".")
    if len(settings.outputs) != len(node.outputs):
        told = len(settings.outputs)
        return f"its attributes tell of {told} outputs and it has {len(node.outputs)} (an older export)"
    vocab = _last_size(node, scope, 0)
    return settings.beyond_kernels(vocab, _last_size(node, scope, TABLE_AT) if settings.has_table else 1) or None


def _last_size(node: Node, scope: Scope, place: int) -> int:
    """The last size of an input's shape, 1 where the file does not say."""
    shape = scope.shapes.get(node.inputs[place]) if len(node.inputs) > place else None
    return shape[-1] if shape and isinstance(shape[-1], int) else 1


def _inlined(
    node: Node, scope: Scope, model: Model, refusal: Refusal, callers: tuple[str, ...] = ()
) -> Iterator[NodeVerdict]:
    """The nodes of a function as they would stand in their caller's place, and of those that they call."""
    body = model.functions[node.domain, node.op_type]
    if node.operator in callers:
        raise EngineError(
            f"the function {node.operator} calls itself, so the graph has no end; export the model again."
        )
    given = list(zip((value.name for value in body.inputs), node.inputs, strict=False))
    inside = Scope(
        {mine: scope.constants[name] for mine, name in given if name in scope.constants},
        {mine: scope.types[name] for mine, name in given if name in scope.types},
        {mine: scope.shapes[name] for mine, name in given if name in scope.shapes},
        scope.within,
    )
    where = f"function {node.operator}"
    for inner, around in walk(body, inside):
        if (inner.domain, inner.op_type) in model.functions:
            yield NodeVerdict(inner.name, inner.operator, where, "inlined")
            yield from _inlined(inner, around, model, refusal, (*callers, node.operator))
        else:
            yield _verdict(inner, where, refusal(inner, around), "inlined")


def _verdict(node: Node, where: str, reason: str | None, otherwise: str) -> NodeVerdict:
    verdict = otherwise if reason is None else "unsupported"
    return NodeVerdict(node.name, node.operator, where, verdict, reason or "")


def _onnxruntime_refusal(node: Node, scope: Scope) -> str | None:
    if node.domain in ("", "ai.onnx", "com.microsoft"):
        return None
    return f"onnxruntime has no operators of {node.domain}"


def _needs(model: Model, target: str) -> str:
    """The oldest version of the target that has every operator of the graph itself."""
    since = operators.SINCE if target == "tensorrt" else _ONNXRUNTIME_SINCE
    nodes = [node for node, _ in walk(model.graph)]
    found = [since[node.op_type] for node in nodes if node.op_type in since]
    if target == "onnxruntime" and any(node.attributes.get("local_window_size", -1) > 0 for node in nodes):
        found.append(_WINDOWS_SINCE)
    return ".".join(map(str, max(found))) if found else ""


def _objections(model: Model, target: str) -> Iterator[str]:
    if target == "tensorrt":
        opset = model.opsets.get("", 0)
        if opset > operators.NEWEST_OPSET:
            yield f"the graph is of opset {opset}, and TensorRT's parser reads up to {operators.NEWEST_OPSET}"
    needed = _needs(model, target)
    installed = _tensorrt_version() if target == "tensorrt" else _onnxruntime_version()
    if needed and installed and _numbers(installed) < _numbers(needed):
        yield f"{_NAMES[target]} {installed} is installed, and the graph needs {needed}"


def _tensorrt_version() -> str | None:
    try:
        return str(tensorrt_module().__version__)
    except PluginError:
        return None


def _onnxruntime_version() -> str | None:
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _asked(model: Path) -> tuple[ParserAnswer | None, str]:
    try:
        return ask_parser(model), ""
    except (PluginError, EngineError) as error:
        return None, str(error).partition("; ")[0].rstrip(".")

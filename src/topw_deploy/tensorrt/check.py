"""Checks before a build which nodes of an exported graph the target supports.

Verdicts:
- `native`: an operator of the target
- `plugin`: the sampler node, which our TensorRT plugin or our operator for onnxruntime runs
- `inlined`: a node of a function, or a call that the nodes of its function replace
- `unsupported`: none of these
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from topw_deploy import versions
from topw_deploy.errors import ParameterError, PluginError, TensorRTError, one_line
from topw_deploy.manifest import MODEL_NAME, TARGETS, DecoderManifest, Manifest, load_manifest
from topw_deploy.onnx_file.model import Model, Node
from topw_deploy.plugins.tensorrt import tensorrt_module
from topw_deploy.plugins.tensorrt.node import INPUTS, TABLE_INPUTS, NodeAttributes
from topw_deploy.tensorrt import operators
from topw_deploy.tensorrt.api import ParserAnswer, ask_parser
from topw_deploy.tensorrt.model_file import read_model
from topw_deploy.tensorrt.scope import Scope, walk_nodes
from topw_deploy.versions import major_minor

SAMPLER = ("topw", "TopWSample")
TABLE_AT = len(INPUTS) + TABLE_INPUTS.index("table")
VERDICTS = ("native", "plugin", "inlined", "unsupported")

_NAMES = {"tensorrt": "TensorRT", "onnxruntime": "onnxruntime"}
_ONNXRUNTIME_SINCE = {"GroupQueryAttention": (1, 23), "Attention": (1, 23), "TensorScatter": (1, 26)}
_WINDOWS_SINCE = (1, 24)  # before 1.24, GroupQueryAttention's windows were a token too long
_MOST_NODES = 1 << 20  # of a graph whose functions are inlined
_MOST_NESTED_CALLS = 16  # functions that call each other

RefusalReason = Callable[[Node, Scope], str | None]


@dataclass(frozen=True)
class NodeVerdict:
    """The verdict on a node.

    where: "graph", or the function that contains the node.
    verdict: one of VERDICTS.
    reason: a clause, or "".
    """

    name: str
    operator: str
    where: str
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class CheckReport:
    """The verdicts on an exported folder.

    needs: oldest version of the target that has all operators; "" for any.
    objections: problems of the whole graph, a clause each.
    parser: the answer of TensorRT's parser; None if it was not asked.
    not_asked: the reason why the parser was not asked, or "".
    next_step: what to do next, in one line.
    """

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
        refused = self.parser is not None and not self.parser.takes and not self.needs_plugin
        return not self.unsupported and not self.objections and not refused

    @property
    def needs_plugin(self) -> bool:
        """Whether the sampler's function cannot replace the plugin."""
        return any(node.verdict == "plugin" and node.reason for node in self.nodes)


def check(out: Path, target: str, *, ask: bool = True) -> CheckReport:
    """Check the nodes of an exported graph for `target`, one of manifest.TARGETS.

    ask: also run TensorRT's parser, if it is installed.

    Raises ManifestError, TensorRTError for a graph that cannot be read, ParameterError for an unknown target.
    """
    if target not in TARGETS:
        raise ParameterError(f"target is {target!r}, but must be one of {', '.join(TARGETS)}.", "target")
    manifest = load_manifest(out)
    model = read_model(out / MODEL_NAME)
    try:
        nodes = tuple(_limit_nodes(sort_nodes(model, target)))
        needs, objections = _least_version(model, target), tuple(_graph_objections(model, target))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise TensorRTError(
            f"{out / MODEL_NAME} has a node that is not valid in ONNX ({one_line(error, 100)}); export the model again."
        ) from None
    answer, not_asked = _ask_parser(out / MODEL_NAME) if ask and target == "tensorrt" else (None, "not wanted")
    report = CheckReport(str(out), target, nodes, needs, objections, answer, not_asked if answer is None else "", "")
    return replace(report, next_step=_advise(report, manifest, out))


def sort_nodes(model: Model, target: str) -> Iterator[NodeVerdict]:
    """Yield a verdict for every node of the graph and of the functions that it calls."""
    refusal_reason: RefusalReason = operators.refusal_reason if target == "tensorrt" else _onnxruntime_refusal
    for node, scope in walk_nodes(model.graph):
        if (node.domain, node.op_type) == SAMPLER:
            yield from _sampler_verdicts(node, scope, model, refusal_reason)
        elif (node.domain, node.op_type) in model.functions:
            yield NodeVerdict(node.name, node.operator, "graph", "inlined")
            yield from _inlined_verdicts(node, scope, model, refusal_reason)
        else:
            yield _node_verdict(node, "graph", refusal_reason(node, scope), "native")


def _sampler_verdicts(node: Node, scope: Scope, model: Model, refusal_reason: RefusalReason) -> Iterator[NodeVerdict]:
    body = model.functions.get(SAMPLER)
    inlined = list(_limit_nodes(_inlined_verdicts(node, scope, model, refusal_reason))) if body is not None else []
    refused = [each for each in inlined if each.verdict == "unsupported"]
    plugin_refusal = _plugin_refusal(node, scope) if refusal_reason is operators.refusal_reason else None
    if body is not None and not refused:
        verdict, reason = (
            ("plugin", "")
            if plugin_refusal is None
            else ("inlined", f"the plugin does not support it: {plugin_refusal}")
        )
        yield NodeVerdict(node.name, node.operator, "graph", verdict, reason)
        yield from inlined
        return
    reason = f"its function has {refused[0].operator}: {refused[0].reason}" if refused else "its function is missing"
    if plugin_refusal is not None:
        reason += f"; and the plugin does not support it: {plugin_refusal}"
    yield NodeVerdict(node.name, node.operator, "graph", "plugin" if plugin_refusal is None else "unsupported", reason)


def _plugin_refusal(node: Node, scope: Scope) -> str | None:
    try:
        attributes = NodeAttributes.from_fields(dict(node.attributes))
    except PluginError as error:
        return str(error).partition(";")[0].rstrip(".")
    if len(attributes.outputs) != len(node.outputs):
        return f"its attributes require {len(attributes.outputs)} outputs, but it has {len(node.outputs)}"
    vocab = _last_size(node, scope, 0)
    return attributes.exceeded_limit(vocab, _last_size(node, scope, TABLE_AT) if attributes.has_table else 1) or None


def _last_size(node: Node, scope: Scope, index: int) -> int:
    """Size of the last axis of input number `index`; 1 if it is unknown."""
    shape = scope.shapes.get(node.inputs[index]) if len(node.inputs) > index else None
    return shape[-1] if shape and isinstance(shape[-1], int) else 1


def _inlined_verdicts(
    node: Node, scope: Scope, model: Model, refusal_reason: RefusalReason, callers: tuple[str, ...] = ()
) -> Iterator[NodeVerdict]:
    body = model.functions[node.domain, node.op_type]
    if node.operator in callers:
        raise TensorRTError(
            f"the function {node.operator} calls itself, so it cannot be inlined; export the model again."
        )
    if len(callers) == _MOST_NESTED_CALLS:
        raise TensorRTError(f"functions call each other more than {_MOST_NESTED_CALLS} deep; export the model again.")
    given = list(zip((value.name for value in body.inputs), node.inputs, strict=False))
    inside = Scope(
        {mine: scope.constants[name] for mine, name in given if name in scope.constants},
        {mine: scope.types[name] for mine, name in given if name in scope.types},
        {mine: scope.shapes[name] for mine, name in given if name in scope.shapes},
        scope.within,
    )
    where = f"function {node.operator}"
    for inner, around in walk_nodes(body, inside):
        if (inner.domain, inner.op_type) in model.functions:
            yield NodeVerdict(inner.name, inner.operator, where, "inlined")
            yield from _inlined_verdicts(inner, around, model, refusal_reason, (*callers, node.operator))
        else:
            yield _node_verdict(inner, where, refusal_reason(inner, around), "inlined")


def _limit_nodes(verdicts: Iterator[NodeVerdict]) -> Iterator[NodeVerdict]:
    """The same verdicts. Raises TensorRTError for more than _MOST_NODES.

    A few functions that each call another one twice can stand for any number of nodes.
    """
    for number, verdict in enumerate(verdicts):
        if number == _MOST_NODES:
            raise TensorRTError(f"inlined, the graph has more than {_MOST_NODES} nodes; export the model again.")
        yield verdict


def _node_verdict(node: Node, where: str, reason: str | None, otherwise: str) -> NodeVerdict:
    verdict = otherwise if reason is None else "unsupported"
    return NodeVerdict(node.name, node.operator, where, verdict, reason or "")


def _onnxruntime_refusal(node: Node, scope: Scope) -> str | None:
    if node.domain in ("", "ai.onnx", "com.microsoft"):
        return None
    return f"onnxruntime has no operators of {node.domain}"


def _least_version(model: Model, target: str) -> str:
    since = operators.SINCE if target == "tensorrt" else _ONNXRUNTIME_SINCE
    nodes = [node for node, _ in walk_nodes(model.graph)]
    found = [since[node.op_type] for node in nodes if node.op_type in since]
    if target == "onnxruntime" and any(node.attributes.get("local_window_size", -1) > 0 for node in nodes):
        found.append(_WINDOWS_SINCE)
    return ".".join(map(str, max(found))) if found else ""


def _graph_objections(model: Model, target: str) -> Iterator[str]:
    if target == "tensorrt":
        opset = model.opsets.get("", 0)
        if opset > operators.NEWEST_OPSET:
            yield f"the graph has opset {opset}, but TensorRT's parser supports at most {operators.NEWEST_OPSET}"
    needed = _least_version(model, target)
    installed = _installed_version(target)
    if needed and installed and major_minor(installed) < major_minor(needed):
        yield f"{_NAMES[target]} {installed} is installed, but the graph needs {needed}"


def _installed_version(target: str) -> str | None:
    if target == "onnxruntime":
        return versions.installed_version("onnxruntime") or versions.installed_version("onnxruntime-gpu")
    try:
        return str(tensorrt_module().__version__)
    except PluginError:
        return None


def _ask_parser(model: Path) -> tuple[ParserAnswer | None, str]:
    try:
        return ask_parser(model), ""
    except (PluginError, TensorRTError) as error:
        return None, str(error).partition("; ")[0].rstrip(".")


def _advise(report: CheckReport, manifest: Manifest, out: Path) -> str:
    folder = shlex.quote(str(out))
    if report.target == "onnxruntime":
        if report.passed and not isinstance(manifest, DecoderManifest):
            return "open the folder with topw_deploy.runtime.TopWSampler, or give model.onnx to onnxruntime"
        return f"topw generate {folder} PROMPT" if report.passed else "export the model again for onnxruntime"
    refused = {node.operator for node in report.unsupported}
    if not report.passed and refused:
        return _advise_export(", ".join(sorted(refused)), manifest)
    if not report.passed:
        return "install a newer TensorRT, or run the folder with onnxruntime"
    if report.needs_plugin:
        return "topw plugins build --cuda (for Python) or --tensorrt-root DIR (for C++): the graph needs the plugin"
    if not isinstance(manifest, DecoderManifest):
        return "give model.onnx to TensorRT's parser, for a profile of your batches and edits"
    if manifest.decoder.kv_form != "static" or manifest.decoder.target != "tensorrt":
        return (
            "topw build-engine needs a decoder with a static cache: export with --target tensorrt --max-length N, or "
            "use another builder"
        )
    without = " --plugin none" if any(node.verdict == "inlined" and node.reason for node in report.nodes) else ""
    return f"topw build-engine {folder}{without}"


def _advise_export(refused: str, manifest: Manifest) -> str:
    if not isinstance(manifest, DecoderManifest):
        return f"export the sampler again with --tail portable or static, and --top-m at most 3840 ({refused})"
    if manifest.source.get("route") == "graft":
        return (
            f"this decoder came from another exporter ({refused}): export the original model with --target tensorrt "
            "--max-length N"
        )
    wanted = "--target tensorrt --max-length N"
    if manifest.decoder.quantisation:
        wanted += " and --dtype fp16 in place of the quantised weights"
    return f"export again with {wanted} ({refused})"

"""`topw check OUT`: check whether a runtime supports every node of an export."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import say, say_json
from topw_deploy.reports import count_text

if TYPE_CHECKING:
    from topw_deploy.tensorrt.check import CheckReport, NodeVerdict

_MOST_NAMED = 3  # maximum number of nodes that are named per reason


@click.command(name="check", context_settings=CONTEXT)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--target", type=click.Choice(("tensorrt", "onnxruntime")), default="tensorrt", show_default=True,
    help="Runtime that will run the graph.",
)  # fmt: skip
@click.option("--ask/--no-ask", default=True, show_default=True, help="Also run TensorRT's own parser, if installed.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, with every node.")
def command(out: Path, target: str, ask: bool, as_json: bool) -> None:
    """Show which nodes of the exported folder OUT are native, for the plugin, inlined or unsupported.

    Builds nothing and reads no weights. Uses a table of what each TensorRT version supports and, if TensorRT is
    installed, its own parser. The exit code is 1 if a node is unsupported.
    """
    from topw_deploy.tensorrt.check import check

    report = check(out, target, ask=ask)
    if as_json:
        say_json({**dataclasses.asdict(report), "passed": report.passed}, indent=2)
    else:
        say(*_lines(report))
    if not report.passed:
        click.get_current_context().exit(1)


def _lines(report: CheckReport) -> Iterator[str]:
    by_verdict = {verdict: [node for node in report.nodes if node.verdict == verdict] for verdict in _VERDICT_TEXTS}
    for verdict, nodes in by_verdict.items():
        if nodes:
            yield f"{verdict.ljust(12)}{_VERDICT_TEXTS[verdict](nodes)}"
            if verdict == "unsupported":
                yield from _reason_lines(nodes)
    if report.needs:
        yield f"{'needs'.ljust(12)}{report.target} {report.needs} or newer"
    for objection in report.objections:
        yield f"{'graph'.ljust(12)}{objection}"
    if report.target == "tensorrt":
        yield from _parser_lines(report)
    yield f"{'next'.ljust(12)}{report.next_step}"


def _parser_lines(report: CheckReport) -> Iterator[str]:
    answer = report.parser
    if answer is None:
        yield f"{'parser'.ljust(12)}not asked: {report.not_asked}"
        return
    how = "with the plugin" if answer.plugin else "without a plugin"
    yield f"{'parser'.ljust(12)}TensorRT {answer.version}, {how}: {'takes all of it' if answer.takes else 'refuses'}"
    for refusal in answer.refusals:
        yield f"{''.ljust(14)}{refusal}"


def _reason_lines(nodes: Sequence[NodeVerdict]) -> Iterator[str]:
    shared: dict[tuple[str, str, str], list[NodeVerdict]] = {}
    for node in nodes:
        shared.setdefault((node.operator, node.where, node.reason), []).append(node)
    for (operator, where, reason), alike in shared.items():
        names = ", ".join(node.name or "unnamed" for node in alike[:_MOST_NAMED])
        more = f" and {len(alike) - _MOST_NAMED} more" if len(alike) > _MOST_NAMED else ""
        inside = "" if where == "graph" else f" in {where}"
        yield f"{''.ljust(14)}{operator} ({names}{more}{inside}): {reason}"


def _counts_text(nodes: Sequence[NodeVerdict]) -> str:
    counts = Counter(node.operator for node in nodes).most_common()
    return f"{count_text(len(nodes), 'node')}: {', '.join(f'{operator} {count}' for operator, count in counts)}"


def _plugin_text(nodes: Sequence[NodeVerdict]) -> str:
    node = nodes[0]
    without = f"and without it nothing: {node.reason}" if node.reason else "or its function where there is none"
    return f"{node.operator} ({node.name}), {without}"


def _inlined_text(nodes: Sequence[NodeVerdict]) -> str:
    inner = [node for node in nodes if node.where != "graph"]
    called = "".join(f"{node.operator} ({node.name}){': ' + node.reason if node.reason else ''}; "
                     for node in nodes if node.where == "graph")  # fmt: skip
    return f"{called}{len(inner)} nodes of functions: {', '.join(sorted({node.operator for node in inner}))}"


_VERDICT_TEXTS = {"native": _counts_text, "plugin": _plugin_text, "inlined": _inlined_text, "unsupported": _counts_text}

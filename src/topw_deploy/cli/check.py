"""`topw check OUT`: ask TensorRT's parser which nodes of an export it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import say, say_json


@click.command(name="check", context_settings=CONTEXT)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(out: Path, as_json: bool) -> None:
    """Ask TensorRT's own parser whether it takes the graph of the exported folder OUT, and which nodes it refuses.

    Needs TensorRT, with the sampler's plugin if `topw plugins build --cuda` built it. Builds nothing. The exit code is
    1 if a node is refused.
    """
    from topw_deploy.tensorrt.check import check

    report = check(out)
    if as_json:
        say_json(dataclasses.asdict(report), indent=2)
    else:
        say(f"TensorRT    {report.tensorrt}: {'takes all of the graph' if report.takes else 'refuses'}")
        say(*(f"            {refusal}" for refusal in report.refusals))
        say(f"sampler     {f'its function: {report.why_no_plugin}' if report.why_no_plugin else 'the plugin'}")
        say(f"next        {report.next_step}")
    if not report.takes:
        click.get_current_context().exit(1)

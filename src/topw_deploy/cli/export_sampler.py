"""`topw export-sampler`: export only the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from topw_deploy import install
from topw_deploy.cli.options import (
    CONTEXT,
    NEEDS_EXPORT,
    baked_options,
    bound_option,
    branches_option,
    crop_options,
    hub_options,
    parameter_options,
    report_options,
    rules_option,
)
from topw_deploy.cli.progress import progress
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.sampling.parameters import PARAMETER_NAMES


@click.command(name="export-sampler", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("model", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--embeddings",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .npy file with the input embeddings [tokens, hidden], instead of MODEL.",
)
@click.option(
    "--vocab-size", type=click.IntRange(min=1), help="Width of the logits.  [default: the number of embeddings]"
)
@click.option(
    "--logits",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .npy file with the model's logits [steps, vocab]; measures the unit of --geom-unit median.",
)
@branches_option
@rules_option
@baked_options
@bound_option
@parameter_options(*PARAMETER_NAMES)
@click.option("--opset", type=int, default=None, help="ONNX opset, 18 to 24.  [default: 23]")
@crop_options
@click.option("--dry-run", is_flag=True, help="Show what would be written; write nothing.")
@click.option("--overwrite", "--force", is_flag=True, help="Replace an earlier export in OUT at the very end.")
@click.option("--no-verify", is_flag=True, help="Do not compare the export with the reference.")
@report_options
@hub_options
def command(model: str | None, out: Path | None, as_json: bool, quiet: bool, **values: Any) -> None:
    """Export the sampler alone into the folder OUT: logits in, tokens out.

    Token distances come from the input embeddings of MODEL (a hub id, a Hugging Face folder, or `tiny`) or from
    --embeddings FILE. --metric uniform with --vocab-size needs neither; OUT is then the only argument.
    """
    if out is None:  # click takes a single argument for MODEL, but it is OUT
        model, out = None, Path(model) if model is not None else None
    if out is None:
        raise click.UsageError("Missing argument 'OUT'.")
    # Import late, for fast --help and usage errors.
    install.require("exporting", "export")
    from topw_deploy.export import export_sampler

    report = export_sampler(model, out, progress=progress(quiet), verify=not values.pop("no_verify"), **values)
    for notice in report.notices:
        tell(f"Note: {notice}.")
    if as_json:
        say_json(msgspec.to_builtins(report, enc_hook=str), indent=2)
    elif report.dry_run:
        say(f"{out} would hold {report.nodes} nodes and {report.weight_bytes:,} bytes of weights")
    else:
        say(report.output)

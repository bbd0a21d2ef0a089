"""`topw-export MODEL OUT`: export a model with its sampler."""

from __future__ import annotations

import sys
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
    quantisation_options,
    report_options,
    rules_option,
)
from topw_deploy.cli.progress import progress
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.text import binary_size

_DTYPES = ("fp32", "fp16", "bf16", "f32", "f16", "float32", "float16", "bfloat16", "int4", "int8")


@click.command(name="export", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("model", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("-m", "--model", "model_option", metavar="MODEL", help="MODEL, given as an option.")
@click.option(
    "-o", "--output", "out_option", metavar="OUT", type=click.Path(path_type=Path), help="OUT, given as an option."
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default=None,
    help="Type of weights and cache; int4 and int8 apply to weights only.  [default: fp32]",
)
@click.option("--opset", type=int, default=None, help="ONNX opset, 23 or 24.  [default: 23; 24 for tensorrt]")
@click.option(
    "--kv",
    type=click.Choice(("static", "concat")),
    default=None,
    help="Key-value cache: a buffer updated in place, or a new, longer copy after each step.  [default: static where "
    "supported]",
)
@click.option(
    "--target",
    type=click.Choice(("onnxruntime", "tensorrt")),
    default=None,
    help="Runtime whose operators the decoder uses.  [default: onnxruntime]",
)
@click.option(
    "--max-length",
    type=int,
    default=None,
    help="Capacity in tokens of the cache for tensorrt, a multiple of 64; 0 leaves it open, which only onnxruntime "
    "supports.  [default: the model's context, at most 4096]",
)
@click.option(
    "--window-cache/--no-window-cache",
    default=None,
    help="Keep only the last tokens in layers with a sliding window, or all of them as onnxruntime before 1.29 needs.  "
    "[default: only the last, where supported]",
)
@quantisation_options
@branches_option
@rules_option
@baked_options
@bound_option
@parameter_options(*PARAMETER_NAMES)
@click.option("--with-logits", is_flag=True, help="Add an output with the logits, for log-probabilities.")
@crop_options
@click.option("--num-hidden-layers", type=int, default=None, help="Export only the first N layers, for tests.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Folder with tokenizer and configuration, for an ONNX decoder without them.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    default=None,
    help="Maximum size of a data file, such as 500MB, 2GB or 2GiB.  [default: one file]",
)
@click.option("--hard-link", is_flag=True, help="Hard-link the data files of an ONNX decoder instead of copying them.")
@click.option(
    "--triton",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Also add the export to this model repository of Triton, as `topw triton` does.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be written, with sizes and memory; write nothing.")
@click.option("--overwrite", "--force", is_flag=True, help="Replace an earlier export in OUT at the very end.")
@click.option("--no-verify", is_flag=True, help="Do not compare the export with the model.")
@click.option("--keep-failed", is_flag=True, help="Keep the files of a failed export in OUT.failed.")
@report_options
@hub_options
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
def command(
    model: str | None, out: Path | None, model_option: str | None, out_option: Path | None, **values: Any
) -> None:
    """Export MODEL with a Top-W sampler into the folder OUT.

    MODEL is a hub id, a Hugging Face folder, `tiny`, or an ONNX decoder (file or folder) made by optimum, mobius or
    onnxruntime-genai.

    --top-m, --alt-iters, --metric, --potential and --knn-k are fixed in the graph. --lam, --beta, --temperature,
    --selection-temperature, --init-top-p and --geom-scale set defaults, which each request can override.
    """
    model, out = _argument_or_option("MODEL", model, model_option), _argument_or_option("OUT", out, out_option)
    # Import late, for fast --help and usage errors.
    install.require("exporting", "export")
    from topw_deploy.export import export_model

    triton, as_json, quiet = values.pop("triton"), values.pop("as_json"), values.pop("quiet")
    report = export_model(model, out, progress=progress(quiet), verify=not values.pop("no_verify"), **values)
    if triton is not None and not report.dry_run:
        from topw_deploy.triton.repository import write_repository

        tell(f"Note: {write_repository(report.output, triton)} is the model for Triton.")
    for notice in report.notices:
        tell(f"Note: {notice}.")
    if as_json:
        say_json(msgspec.to_builtins(report, enc_hook=str), indent=2)
    else:
        say(*_report_lines(report))


def _argument_or_option(name: str, positional: Any, option: Any) -> Any:
    """The value of an argument that may also be an option. Raises UsageError unless exactly one is given."""
    if positional is not None and option is not None:
        raise click.UsageError(f"{name} is given twice, as an argument and as an option.")
    if positional is None and option is None:
        raise click.UsageError(f"Missing argument '{name}'.")
    return positional if positional is not None else option


def _report_lines(report: Any) -> list[str]:
    """The folder, or what a dry run would write."""
    if not report.dry_run:
        return [str(report.output)]
    weights = f"{report.nodes} nodes, {report.weight_bytes:,} bytes of weights"
    lines = [f"{report.output} would hold {report.model_type}: {weights}"]
    for title, tensors in (("inputs", report.inputs), ("outputs", report.outputs)):
        lines.append(f"{title}:")
        lines += [f"  {t.name}  {t.dtype}  [{', '.join(map(str, t.shape))}]" for t in tensors]
    if report.states:
        lines.append("states of a sequence:")
        width = max(map(len, report.states))
        for kind, (fixed, token) in report.states.items():
            size = f"{binary_size(token)} a token" if token else binary_size(fixed)
            lines.append(f"  {kind.ljust(width)}  {size}")
    for title, amounts in (("files", report.sizes), ("peak memory", report.memory)):
        lines += [f"{title}:", *_amount_lines(amounts)] if amounts else []
    return lines


def _amount_lines(amounts: dict[str, int]) -> list[str]:
    width = max(map(len, amounts), default=0)
    return [f"  {name.ljust(width)}  {binary_size(size)} ({size:,} bytes)" for name, size in amounts.items()]


if __name__ == "__main__":
    sys.exit(command())

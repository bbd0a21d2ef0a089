"""`topw-export MODEL OUT`: from a model to a folder whose graph samples by Top-W."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from topw_deploy import install
from topw_deploy.cli.options import (
    CONTEXT,
    NEEDS_EXPORT,
    baked_options,
    bound_option,
    given,
    hub_options,
    parameter_options,
    quantisation_options,
    tail_option,
)
from topw_deploy.cli.progress import bar, phase
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.sampling.parameters import OPTION_NAMES, PARAMETER_NAMES
from topw_deploy.sizes import binary_size

_DTYPES = ("fp32", "fp16", "bf16", "f32", "f16", "float32", "float16", "bfloat16", "int4", "int8")


@click.command(name="export", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("model", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("-m", "--model", "model_option", metavar="MODEL", help="The same as the first argument.")
@click.option(
    "-o", "--output", "out_option", metavar="OUT", type=click.Path(path_type=Path), help="The same as the second."
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default=None,
    help="Type of weights and cache; int4, int8: of the weights alone.  [default: fp32]",
)
@click.option("--opset", type=int, default=None, help="ONNX opset, 23 or 24.  [default: 23, 24 for tensorrt]")
@click.option(
    "--kv",
    type=click.Choice(("static", "concat")),
    default=None,
    help="The cache: one buffer written in place, or past in and past + new out.  [default: static where possible]",
)
@click.option(
    "--target",
    type=click.Choice(("onnxruntime", "tensorrt")),
    default=None,
    help="Whose operators the decoder is written in.  [default: onnxruntime]",
)
@click.option(
    "--max-length",
    type=int,
    default=None,
    help="Tokens that the cache for tensorrt holds, a multiple of 64; 0: any number, for onnxruntime alone.  "
    "[default: the model's context, at most 4096]",
)
@quantisation_options
@tail_option
@baked_options
@bound_option
@parameter_options
@click.option("--with-logits", is_flag=True, help="Keep the logits as an output.")
@click.option("--with-mass", is_flag=True, help="Add the crop's probability as an output.")
@click.option("--with-keep-mask", is_flag=True, help="Add the crop itself, a bool per token, as an output.")
@click.option("--num-hidden-layers", type=int, default=None, help="Export only the first so many layers (for tests).")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="Folder with tokenizer and configuration, for a decoder that comes without.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    default=None,
    help="Most bytes of one data file, like 500MB, 2GB or 2GiB.  [default: one file]",
)
@click.option("--hard-link", is_flag=True, help="Share an ONNX decoder's data files instead of copying them.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and what it would take; write nothing.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted export to OUT stopped; if interrupted, stay.")
@click.option("--overwrite", "--force", is_flag=True, help="Replace an earlier export in OUT, at the very end.")
@click.option("--no-verify", is_flag=True, help="Skip the comparison with the source.")
@click.option("--keep-failed", is_flag=True, help="Keep what a failed export wrote as OUT.failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
@hub_options
@click.option("--trust-remote-code", is_flag=True, help="Run code that the model brings along.")
def command(
    model: str | None, out: Path | None, model_option: str | None, out_option: Path | None, **values: Any
) -> None:
    """Export MODEL with its Top-W sampler into the folder OUT.

    MODEL is a hub id, a Hugging Face folder, `demo`, or a folder or file with an ONNX decoder made by optimum, mobius
    or onnxruntime-genai. Options of the sampler either fix it (--top-m, --alt-iters, --metric, --potential, --knn-k)
    or set the defaults of requests.
    """
    model, out = _one("MODEL", model, model_option), _one("OUT", out, out_option)
    # Imported late: --help and usage errors must not wait for torch.
    install.require("exporting", "export")
    from topw_deploy.export.pipeline import export_model
    from topw_deploy.export.request import DTYPE_ALIASES, ExportRequest, with_preset

    as_json, quiet = values.pop("as_json"), values.pop("quiet")
    try:
        defaults, options = with_preset(
            values.pop("preset"), given(values, PARAMETER_NAMES), given(values, OPTION_NAMES)
        )
        dtype = values.pop("dtype")
        rest = {name: value for name, value in values.items() if name not in (*PARAMETER_NAMES, *OPTION_NAMES)}
        request = ExportRequest(
            model=model,
            output=out,
            dtype=DTYPE_ALIASES.get(dtype, dtype),
            options=options,
            defaults=defaults,
            verify=not rest.pop("no_verify"),
            **rest,
        )
        report = export_model(request, *(() if quiet else (phase, bar)))
    except KeyboardInterrupt:
        if values["resume"]:
            tell(f"What is finished stays beside {out}; the same command goes on from there.")
        raise
    for notice in report.notices:
        tell(f"Note: {notice}.")
    if as_json:
        say_json(dataclasses.asdict(report), indent=2)
    else:
        say(*_lines(report))


def _one(name: str, positional: Any, option: Any) -> Any:
    """The value given as an argument or as an option; a usage error for none or both."""
    if positional is not None and option is not None:
        raise click.UsageError(f"{name} is given twice, as an argument and as an option.")
    if positional is None and option is None:
        raise click.UsageError(f"Missing argument '{name}'.")
    return positional if positional is not None else option


def _lines(report: Any) -> list[str]:
    if not report.dry_run:
        return [str(report.output)]
    weights = f"{report.nodes} nodes, {report.weight_bytes:,} bytes of weights"
    lines = [f"{report.output} would hold {report.model_type}: {weights}"]
    for title, tensors in (("inputs", report.inputs), ("outputs", report.outputs)):
        lines.append(f"{title}:")
        lines += [f"  {t.name}  {t.dtype}  [{', '.join(map(str, t.shape))}]" for t in tensors]
    for title, amounts in (("files", report.sizes), ("peak memory", report.memory)):
        lines += [f"{title}:", *_amounts(amounts)] if amounts else []
    return lines


def _amounts(amounts: dict[str, int]) -> list[str]:
    """A line each: name and bytes, for people and exactly."""
    width = max(map(len, amounts), default=0)
    return [f"  {name.ljust(width)}  {binary_size(size)} ({size:,} bytes)" for name, size in amounts.items()]


if __name__ == "__main__":
    sys.exit(command())

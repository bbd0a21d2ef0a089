"""`topw-export MODEL OUT`: export a model with its sampler."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from topw_deploy import install
from topw_deploy.cli.options import (
    CONTEXT,
    COUNT,
    FILE,
    NEEDS_EXPORT,
    PATH,
    json_option,
    model_option,
    quantisation_options,
    sampler_options,
    take_words,
)
from topw_deploy.cli.terminal import Stages, progress, say, say_json, tell, waiting
from topw_deploy.errors import MissingPackageError, VerificationError
from topw_deploy.progress import Progress
from topw_deploy.text import count_text, decimal_size

if TYPE_CHECKING:
    from topw_deploy.export.options import ExportReport

_DTYPES = ("fp32", "fp16", "bf16", "f32", "f16", "float32", "float16", "bfloat16", "int4", "int8")
_trust_option = click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")


@click.command(name="export", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("words", metavar="MODEL OUT", nargs=-1)
@model_option
@click.option("-o", "--output", "out", metavar="OUT", type=PATH, help="OUT, given as an option.")
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    help="Type of weights and cache; int4 and int8 apply to weights only.  [default: fp32]",
)
@click.option("--opset", type=int, help="ONNX opset, 23 or 24.  [default: 23; 24 for tensorrt]")
@click.option(
    "--kv",
    type=click.Choice(("static", "concat")),
    help="Key-value cache: a buffer updated in place, or a new, longer copy after each step.  [default: static where "
    "supported]",
)
@click.option(
    "--target",
    type=click.Choice(("onnxruntime", "tensorrt")),
    help="Runtime whose operators the decoder uses.  [default: onnxruntime]",
)
@click.option(
    "--max-length",
    type=int,
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
@sampler_options
@click.option("--with-logits", is_flag=True, help="Add an output with the logits, for log-probabilities.")
@click.option("--num-hidden-layers", type=int, help="Export only the first N layers, for tests.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with tokenizer and configuration, for an ONNX decoder without them.",
)
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    help="Maximum size of a data file, such as 500MB or 2GB.  [default: one file]",
)
@click.option("--hard-link", is_flag=True, help="Hard-link the data files of an ONNX decoder instead of copying them.")
@click.option(
    "--triton",
    metavar="DIR",
    type=PATH,
    help="Also add the export to this model repository of Triton, as `topw triton` does.",
)
@click.option("--keep-failed", is_flag=True, help="Keep the files of a failed export in OUT.failed.")
@_trust_option
def export(words: tuple[str, ...], model: str | None, out: Path | None, triton: Path | None, **values: Any) -> None:
    """Export MODEL with a Top-W sampler into the folder OUT.

    MODEL is a hub id, a Hugging Face folder, `tiny`, `smollm2`, a GGUF file, or an ONNX decoder (file or folder) made
    by optimum, mobius or onnxruntime-genai.

    --top-m, --alt-iters, --metric, --potential and --knn-k are fixed in the graph. --lam, --beta, --temperature,
    --selection-temperature, --init-top-p and --geom-scale set defaults, which each request can override.
    """
    model, out = take_words(words, 0, MODEL=model, OUT=out)
    # Import late, for fast --help and usage errors.
    install.require("exporting", "export")
    from topw_deploy.export import export_model

    report = _run(export_model, model, Path(str(out)), values)
    if triton is not None and not report.dry_run:
        from topw_deploy.triton.repository import write_repository

        tell(f"Note: {write_repository(report.output, triton)} is the model for Triton.")


def _run(exporter: Any, model: str | None, out: Path, values: dict[str, Any]) -> ExportReport:
    """Call `export_model` or `export_sampler` with the values of a command's options, and print the report."""
    as_json, quiet, verbose = values.pop("as_json"), values.pop("quiet"), values.pop("verbose")
    stages, verify = Stages(verbose=verbose), not values.pop("no_verify")
    try:
        report: ExportReport = exporter(model, out, progress=progress(quiet, stages.say), verify=verify, **values)
    except Exception as error:
        tell(*stages.details if isinstance(error, VerificationError) and not verbose else ())
        raise
    finally:
        stages.hide()
    stages.end()
    for notice in report.notices:
        tell(f"Note: {notice}.")
    if as_json:
        say_json(msgspec.to_builtins(report, enc_hook=str), indent=2)
    else:
        say(*_report_lines(report))
    if not (quiet or as_json or report.dry_run):
        tell(_verdict(report, stages.seconds), *_next_step(report, values.get("target")))
    return report


def _verdict(report: ExportReport, seconds: Mapping[str, float]) -> str:
    """How much of the export was verified, in one line. seconds: of each stage."""
    found = report.verification
    if found.status == "skipped":
        return "Not verified, because of --no-verify"
    duration = sum(taken for stage, taken in seconds.items() if stage.startswith("Verifying"))
    checks = f"{count_text(len(found.checks), 'check')} in {duration:.1f} s"
    if found.status == "passed":
        return f"Verified: {checks}"
    failed = [check.name for check in found.checks if not check.passed]
    parts = (("failed", failed), ("not compared", [each.name for each in found.not_compared]))
    listed = "".join(f"; {title}: {', '.join(names)}" for title, names in parts if names)
    return f"Verified in part: {checks}{listed}"


def _next_step(report: ExportReport, target: str | None) -> list[str]:
    """The command that uses a decoder; [] for a sampler alone."""
    if "tokenizer.json" not in report.files:
        return []
    out = shlex.quote(str(report.output))
    if target == "tensorrt":
        return [f"Next: topw build-engine {out}"]
    if "chat_template.jinja" in report.files:
        return [f"Next: topw chat {out}"]
    return [f'Next: topw generate {out} "Once upon a time"']


def _report_lines(report: ExportReport) -> list[str]:
    """The folder, or what a dry run would write."""
    if not report.dry_run:
        return [str(report.output)]
    weights = f"{report.nodes} nodes, {decimal_size(report.weight_bytes)} of weights"
    lines = [f"{report.output} would hold {report.model_type}: {weights}"]
    for title, tensors in (("inputs", report.inputs), ("outputs", report.outputs)):
        lines.append(f"{title}:")
        lines += [f"  {t.name}  {t.dtype}  [{', '.join(map(str, t.shape))}]" for t in tensors]
    states = {kind: f"{decimal_size(token)} a token" if token else decimal_size(fixed)
              for kind, (fixed, token) in report.states.items()}  # fmt: skip
    sizes, memory = (
        {name: f"{decimal_size(size)} ({size:,} bytes)" for name, size in amounts.items()}
        for amounts in (report.sizes, report.memory)
    )
    for title, texts in (("states of a sequence", states), ("files", sizes), ("peak memory", memory)):
        width = max(map(len, texts), default=0)
        lines += [f"{title}:", *(f"  {name.ljust(width)}  {text}" for name, text in texts.items())] if texts else []
    return lines


@click.command(name="export-sampler", context_settings=CONTEXT, epilog=NEEDS_EXPORT)
@click.argument("model", required=False)
@click.argument("out", required=False, type=PATH)
@click.option(
    "--embeddings", type=FILE, help="A .npy file with the input embeddings [tokens, hidden], instead of MODEL."
)
@click.option("--vocab-size", type=COUNT, help="Width of the logits.  [default: the number of embeddings]")
@click.option(
    "--logits",
    type=FILE,
    help="A .npy file with the model's logits [steps, vocab]; measures the unit of --geom-unit median.",
)
@sampler_options
@click.option("--opset", type=int, help="ONNX opset, 18 to 24.  [default: 23]")
def export_sampler(model: str | None, out: Path | None, **values: Any) -> None:
    """Export the sampler alone into the folder OUT: logits in, tokens out.

    Token distances come from the input embeddings of MODEL (a hub id, a Hugging Face folder, or `tiny`) or from
    --embeddings FILE; --metric uniform with --vocab-size needs neither. Without MODEL, OUT is the only argument.
    """
    if out is None and (values["embeddings"] is not None or values["metric"] == "uniform"):
        # click takes a single argument for MODEL, but it is OUT
        model, out = None, Path(model) if model is not None else None
    if out is None:
        raise click.UsageError("Missing argument 'OUT'.")
    # Import late, for fast --help and usage errors.
    install.require("exporting", "export")
    from topw_deploy.export import export_sampler

    _run(export_sampler, model, out, values)


@click.command(name="verify", context_settings=CONTEXT)
@click.argument("out", metavar="MODEL", type=PATH)
@click.option("--source", metavar="SOURCE", help="Model to compare with.  [default: the manifest's source]")
@click.option("--hashes-only", is_flag=True, help="Compare the files with the manifest and run nothing.")
@_trust_option
@json_option
def verify(out: Path, source: str | None, hashes_only: bool, trust_remote_code: bool, as_json: bool) -> None:
    """Compare the files of MODEL with its manifest, and its graph with the model it was exported from.

    A check that cannot run here (no torch, the source is gone) is listed with the reason and does not fail.
    """
    from topw_deploy.manifest import check_hashes, load_manifest

    manifest = load_manifest(out)
    check_hashes(out, manifest)
    tell(f"  -[✓] sizes and SHA-256 of {count_text(len(manifest.files), 'file')}: as in the manifest")
    checks, skipped, verification_notes = [], [], []
    try:
        if not hashes_only:
            install.require("it", "export")
            from topw_deploy.export.verification.run import recheck

            with waiting("Verifying"):
                outcome = recheck(out, manifest, source, trust_remote_code, Progress(tell))
            checks, verification_notes = msgspec.to_builtins([outcome.checks, outcome.notes])
            skipped = [(each.name, each.reason) for each in outcome.not_compared]
    except MissingPackageError as error:
        tell(f"  -[-] the graph: not compared, {error}")
        skipped = [("graph", str(error))]
    failed = [check["name"] for check in checks if not check["passed"]]
    if as_json:
        result = {"folder": str(out), "files": len(manifest.files), "checks": checks, "skipped": skipped}
        say_json({**result, "notes": verification_notes}, indent=2)
    elif not failed:
        say(f"{out} is intact; {count_text(len(checks), 'check')} passed, {len(skipped)} not compared")
    if failed:
        raise click.ClickException(
            f"{count_text(len(failed), 'check')} failed (first: {failed[0]}); export the model again."
        )


@click.command(name="check", context_settings=CONTEXT)
@click.argument("out", metavar="MODEL", type=PATH)
@json_option
def check(out: Path, as_json: bool) -> None:
    """Ask TensorRT's own parser whether it takes the graph of the exported folder MODEL, and which nodes it refuses.

    Needs TensorRT, with the sampler's plugin if `topw plugins build --cuda` built it. Builds nothing. The exit code is
    1 if a node is refused.
    """
    from topw_deploy.tensorrt.check import check

    report = check(out)
    if as_json:
        say_json(asdict(report), indent=2)
    else:
        say(f"TensorRT    {report.tensorrt}: {'takes all of the graph' if report.takes else 'refuses'}")
        say(*(f"            {refusal}" for refusal in report.refusals))
        say(f"sampler     {f'its function: {report.why_no_plugin}' if report.why_no_plugin else 'the plugin'}")
        say(f"next        {report.next_step}")
    if not report.takes:
        click.get_current_context().exit(1)

"""`topw inspect`: show what an exported folder contains. Needs neither onnxruntime nor onnx."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from topw_deploy.cli.options import CONTEXT, PATH, json_option
from topw_deploy.cli.terminal import say, say_json
from topw_deploy.errors import TensorRTError
from topw_deploy.manifest import DecoderInfo, DecoderManifest, Manifest, TensorSpec, Verification, load_manifest
from topw_deploy.sampling.rules import RULES
from topw_deploy.tensorrt.stamp import FOLDER, folder_problem, read_stamp, stamp_paths, unfinished_engines
from topw_deploy.text import decimal_size

_CACHE_FORMS = {
    "concat": "past in, past plus new tokens out",
    "static": "one buffer, written in place",
    "shared": "one buffer, written in place, rows of equal lengths",
}


@click.command(name="inspect", context_settings=CONTEXT)
@click.argument("folder", metavar="MODEL", type=PATH)
@json_option
def inspect(folder: Path, as_json: bool) -> None:
    """Show the manifest, parameters, graph and engines of the exported folder MODEL.

    Names and sizes of its files are checked; `topw verify` also checks their contents.
    """
    manifest = load_manifest(folder, unfinished=True)
    if as_json:
        say_json(msgspec.to_builtins(manifest), indent=2)
    else:
        say(*_lines(folder, manifest))


def _lines(folder: Path, manifest: Manifest) -> Iterator[str]:
    sampler = manifest.sampler
    yield from _section_lines("model", [("kind", manifest.kind), *manifest.source.items()])
    if isinstance(manifest, DecoderManifest):
        yield from _section_lines("decoder", _decoder_rows(manifest.decoder))
    yield from _section_lines(
        "sampler",
        [
            ("vocabulary", sampler.vocab_size),
            ("embedding width", "none (uniform metric)" if sampler.hidden_size is None else sampler.hidden_size),
            ("branches", "yes" if sampler.branches else "no"),
            ("rules", "all" if len(sampler.rules) == len(RULES) else ", ".join(sampler.rules)),
            *((name, value) for name, value in asdict(sampler.options).items()),
            *([("table", sampler.table_form)] if sampler.table_form else []),
            ("neighbour bound", "stored" if sampler.neighbour_bound else "none"),
            ("median distance", "not measured" if (median := manifest.median_distance) is None else f"{median:.4g}"),
        ],
    )
    yield from _section_lines("defaults", manifest.stated_defaults.items())
    yield from _section_lines("inputs", _tensor_rows(manifest.inputs))
    yield from _section_lines("outputs", _tensor_rows(manifest.outputs))
    yield from _engine_lines(folder)
    yield from _section_lines(
        "files", ((name, decimal_size(entry.size)) for name, entry in sorted(manifest.files.items()))
    )
    yield from _section_lines("verification", _verification_rows(manifest.verification))
    opset = [(f"opset {domain or 'ai.onnx'}", version) for domain, version in manifest.opset.items()]
    yield from _section_lines("written with", [*opset, *manifest.libraries.items()])


def _engine_lines(folder: Path) -> Iterator[str]:
    """A section with a row per engine, including engines for other machines; nothing without engines."""
    rows: list[tuple[str, object]] = []
    for path in stamp_paths(folder):
        try:
            stamp = read_stamp(path)
        except TensorRTError as error:
            rows.append((path.name, str(error)))
            continue
        profiles = " and ".join(profile.name for profile in stamp.profiles)
        bounds = "{} rows, {} tokens and {} edits of each".format(*stamp.most)
        sampler = "the plugin" if stamp.plugin else "its function"
        rows.append((stamp.engine, f"{decimal_size(stamp.size)}, for {profiles}: {bounds}; sampled by {sampler}"))
    interrupted = "not used: it has no stamp, so its build was interrupted"
    rows += [(path.name, interrupted) for path in unfinished_engines(folder)]
    if reason := folder_problem(folder):
        rows.append((FOLDER, f"not used: {reason}"))
    if rows:
        yield from _section_lines("engines", rows)


def _decoder_rows(decoder: DecoderInfo) -> Iterator[tuple[str, object]]:
    yield "model type", decoder.model_type
    yield "layers", decoder.num_layers
    yield "attention", decoder.attention
    yield "target", decoder.target
    yield "cache", f"{decoder.kv_form}: {_CACHE_FORMS.get(decoder.kv_form, '')}"
    yield from _state_rows(decoder)
    if decoder.least_onnxruntime:
        yield "needs", f"onnxruntime {decoder.least_onnxruntime} or newer"
    if decoder.buffer_step and decoder.buffer_step == decoder.buffer_least:
        yield "cache length", f"{decoder.buffer_step} tokens, fixed at the export (--max-length)"
    elif decoder.buffer_step:
        yield "cache grows", f"in steps of {decoder.buffer_step} tokens"
    if not decoder.ragged_chunks:
        yield "batches", "each row's prompt chunks after the first run separately"
    if decoder.weights:
        total = f"{decimal_size(sum(decoder.weights.values()))} in all"
        yield "weights", "; ".join([*(f"{name} {decimal_size(n)}" for name, n in decoder.weights.items()), total])
    else:
        yield "weights", decoder.weights_dtype
    if how := decoder.quantisation:
        zeros = "symmetric" if how.get("symmetric") else "with zero points"
        yield (
            "quantised",
            f"blocks of {how.get('block_size')}, {zeros}, "
            f"accuracy level {how.get('accuracy_level')}, table and head {how.get('table_bits', how.get('bits'))} bits",
        )
    yield "context", f"{decoder.context_length} tokens"
    ragged = decoder.left_padding or decoder.right_padding
    yield "prompts of a batch", "may have different lengths" if ragged else "must have equal lengths"


def _state_rows(decoder: DecoderInfo) -> Iterator[tuple[str, object]]:
    total = 0
    for kind, (fixed, token) in decoder.state_bytes().items():
        states = [state for state in decoder.states if state.kind == kind]
        layers = len({state.layer for state in states})
        shapes = sorted({(state.dtype, state.shape) for state in states})
        layout = ", ".join(f"{dtype} {' x '.join(str(size or 'tokens') for size in shape)}" for dtype, shape in shapes)
        total += fixed + token * decoder.context_length
        size = f"{decimal_size(token)} a token" if token else decimal_size(fixed)
        yield f"{kind} states", f"{layers} layers, {layout}: {size}"
    yield "cache size", f"{decimal_size(total)} for one sequence of the full context"


def _section_lines(title: str, rows: Iterable[tuple[str, object]]) -> Iterator[str]:
    pairs = [(name, str(value).rstrip()) for name, value in rows if str(value)]
    width = max((len(name) for name, _ in pairs), default=0)
    yield title
    for name, value in pairs:
        yield f"  {name.ljust(width)}  {value}"


def _tensor_rows(specs: Iterable[TensorSpec]) -> Iterator[tuple[str, str]]:
    """Yield the tensors, of those of the cache only the first layer's: others differ only in the layer's number."""
    for spec in specs:
        parts = spec.name.split(".")
        if len(parts) != 3 or parts[1] == "0":
            name = spec.name if len(parts) != 3 else f"{parts[0]}.*.{parts[2]}"
            yield name, f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"


def _verification_rows(verification: Verification) -> Iterator[tuple[str, str]]:
    yield "status", verification.status
    for check in verification.checks:
        verdict = "passed" if check.passed else "FAILED"
        yield check.name, f"{verdict}, {check.difference:.3g} (bound {check.bound:.3g}) {check.detail}"
    for missing in verification.not_compared:
        yield missing.name, f"not compared, {missing.reason}"
    for note in verification.notes:
        yield note.name, f"for information, {note.text}"

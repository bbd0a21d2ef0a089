"""The stages of an export: find the source, build the graph, write files, verify them, rename the folder into place."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from msgspec import structs

from topw_deploy.errors import ParameterError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.options import ExportKeywords, ExportOptions, ExportReport, SamplerOptions, read_options
from topw_deploy.export.plan import layers_to_verify, plan_of, verification_bytes
from topw_deploy.export.quantise import quantise
from topw_deploy.export.quantise.experts import least_onnxruntime
from topw_deploy.export.quantise.stored_rows import StoredRows
from topw_deploy.export.sampler.attach import attach_sampler
from topw_deploy.export.sampler.neighbour_bound import choose_measure
from topw_deploy.export.sampler.spec import SamplerSpec
from topw_deploy.export.source.configuration import copy_genai_configuration, write_configuration
from topw_deploy.export.source.quantised import quantised_format
from topw_deploy.export.source.resolve import Source, resolve
from topw_deploy.export.source.tokenizer import check_tokenizer, write_tokenizer
from topw_deploy.export.write.manifest import decoder_manifest, decoder_report, file_bytes_in
from topw_deploy.export.write.weights import bytes_by_type, copy_data_files, write_model
from topw_deploy.folders import atomic_folder, check_free, require_space
from topw_deploy.install import major_minor
from topw_deploy.manifest import MANIFEST_NAME, DecoderManifest, Verification, save_manifest
from topw_deploy.progress import SILENT, Progress, StageMemory
from topw_deploy.text import decimal_size

_KIND = "an export of topw_deploy"


def export_model(
    model: str | Path, out: str | Path, *, progress: Progress = SILENT, **options: Unpack[ExportKeywords]
) -> ExportReport:
    """Write and verify the folder `out`, an export of `model`. If it fails, `out` is unchanged.

    model: a hub id, a folder, an ONNX file or `tiny`.
    options: those of `topw-export`, see ExportOptions.
    Raises SourceError, UnsupportedModelError, TokenizerError or ParameterError before anything is written, ExportError
    if writing fails or another process writes `out`, and VerificationError if the written graph is wrong.
    """
    chosen, out = read_options(ExportOptions, options), Path(out)
    started, memory = time.monotonic(), StageMemory()
    if chosen.dry_run:
        check_free(out, marker=MANIFEST_NAME, kind=_KIND, overwrite=chosen.overwrite)
        source = find_source(str(model), chosen, progress)
        with memory.stage("graph"):
            decoder, _ = build_graph(source, chosen, progress)
        plan = plan_of(decoder, source, chosen, out)
        return decoder_report(decoder, out, started, plan.files, {**memory.peaks, **plan.memory})
    with export_folder(out, chosen, keep_failed=chosen.keep_failed) as folder:
        source = find_source(str(model), chosen, progress)
        with memory.stage("graph"):
            decoder, sampler = build_graph(source, chosen, progress)
        with memory.stage("writing"):
            manifest = write_files(decoder, sampler, source, chosen, folder, progress)
        verification = verify(decoder, source, chosen, folder, progress, memory)
        save_manifest(folder, structs.replace(manifest, decoder=decoder.info, verification=verification))
        report = decoder_report(decoder, out, started, file_bytes_in(folder), memory.peaks, verification)
        progress.say(f"Moving the finished folder to {out}")
    return report


def export_folder(out: Path, options: SamplerOptions, *, keep_failed: bool = False) -> AbstractContextManager[Path]:
    """The folder to write, which becomes `out`."""
    return atomic_folder(out, marker=MANIFEST_NAME, kind=_KIND, overwrite=options.overwrite, keep_failed=keep_failed)


def find_source(model: str, options: ExportOptions, progress: Progress) -> Source:
    """The source of the model. Raises SourceError or TokenizerError without a tokenizer that can be copied."""
    progress.say(f"Finding {model}")
    source = resolve(model, options.tokenizer, **options.hub)
    check_tokenizer(source.tokenizer)
    return source


def build_graph(source: Source, options: ExportOptions, progress: Progress) -> tuple[Decoder, SamplerSpec]:
    """The decoder with the sampler attached to it, and the sampler's description."""
    if source.onnx is not None:
        from topw_deploy.export.foreign import load_decoder

        options.check_for_onnx(source.onnx.name)
        progress.say(f"Reading the decoder {source.onnx}")
        decoder = load_decoder(source.onnx, source.tokenizer)
    else:
        decoder = _build_decoder(source, options, progress)
    progress.say(f"Attaching the sampler (top_m {options.top_w.top_m}, metric {options.top_w.metric})")
    return attach_sampler(decoder, options, choose_measure(options.neighbour_bound, options.dry_run, progress))


def _build_decoder(source: Source, options: ExportOptions, progress: Progress) -> Decoder:
    """The decoder of a checkpoint, quantised if the options say so."""
    if options.hard_link:
        raise ParameterError(
            "hard_link shares the data files of an ONNX decoder, but this model is a checkpoint, whose weights are "
            "written anew; leave --hard-link out.",
            "hard_link",
        )
    from topw_deploy.export.traced_decoder import build_decoder

    stored, scheme = quantised_format(source.folder), options.quantisation
    if scheme is None:
        return build_decoder(source, options, progress)
    if stored is not None and stored.integers and options.torch_dtype != "float32":
        raise ParameterError(
            f"compute_dtype is {options.compute_dtype!r}, but {source.id} holds {stored.name} codes, which can be kept "
            "only with compute_dtype 'fp32'; leave --compute-dtype out.",
            "compute_dtype",
        )
    decoder = build_decoder(source, options, progress)
    progress.say(f"Quantising products and embedding to {scheme.dtype}")
    rows = StoredRows.of(source.folder)
    decoder.notices += quantise(decoder.model, scheme, rows, cut=options.num_hidden_layers is not None)
    least = max(decoder.info.least_onnxruntime, least_onnxruntime(decoder.model.graph), key=major_minor)
    decoder.info = structs.replace(
        decoder.info, weights_dtype=scheme.dtype, quantisation=scheme.as_dict(), least_onnxruntime=least
    )
    if stored is not None and not stored.integers:
        decoder.notices.append(
            f"the checkpoint's {stored.name} weights were decoded and rounded again to {scheme.dtype}, because their "
            "codes are not integers that MatMulNBits could keep"
        )
    return decoder


def write_files(
    decoder: Decoder, sampler: SamplerSpec, source: Source, options: ExportOptions, folder: Path, progress: Progress
) -> DecoderManifest:
    """Write all files to `folder`, with a manifest that the runtime refuses because the verification is missing.

    Returns this manifest.
    """
    plan = plan_of(decoder, source, options, folder)
    require_space(folder.parent, plan.needed_bytes)
    progress.say(f"Writing {decimal_size(sum(plan.files.values()))}")
    with progress.bar(plan.data_bytes, "B") as advance:
        copy_data_files(decoder.model, source, folder, advance, hard_link=options.hard_link)
        hashes = write_model(decoder.model, folder, advance, plan.slots)
    progress.say("Copying tokenizer and configuration")
    decoder.notices += write_tokenizer(source.tokenizer, folder, trust_remote_code=options.trust_remote_code)
    write_configuration(source, folder, options.num_hidden_layers)
    decoder.notices += copy_genai_configuration(source, folder, options.with_logits)
    decoder.info = structs.replace(decoder.info, weights=bytes_by_type(decoder.model))
    manifest = decoder_manifest(decoder, sampler, source, options, folder, hashes)
    save_manifest(folder, manifest)
    return manifest


def verify(
    decoder: Decoder, source: Source, options: ExportOptions, folder: Path, progress: Progress, memory: StageMemory
) -> Verification:
    """Verify the written files, unless the options say not to. Forbid padding if padded rows are wrong or unchecked."""
    if not options.verify:
        if decoder.foreign:
            _forbid_padding(decoder, "was not checked for {side} padding")
        return Verification(status="skipped")
    from topw_deploy.export.verification.run import verify_in_subprocess

    layers = layers_to_verify(decoder, source)
    if layers is None:
        progress.say("Verifying")
        verification, may_pad, peak = verify_in_subprocess(source, options, folder, progress)
    else:
        decoder.notices.append(
            f"there is too little memory to verify all {decoder.info.num_layers} layers, which takes about "
            f"{decimal_size(verification_bytes(decoder))}: the first {layers} were exported alone and verified"
        )
        progress.say(f"Verifying the first {layers} layers")
        verification, may_pad, peak = _verify_first_layers(layers, source, options, folder, progress)
    memory.peaks["verification"] = peak
    if not may_pad:
        _forbid_padding(decoder, "is wrong for rows padded on the {side}")
    return verification


def _forbid_padding(decoder: Decoder, reason: str) -> None:
    """Forbid padded rows, with a notice if `decoder` allows them."""
    if decoder.info.left_padding or decoder.info.right_padding:
        side = "left" if decoder.info.left_padding else "right"
        decoder.info = structs.replace(decoder.info, left_padding=False, right_padding=False)
        decoder.notices.append(
            f"this decoder {reason.format(side=side)}, so the prompts of a batch must have equal lengths"
        )


def _verify_first_layers(
    layers: int, source: Source, options: ExportOptions, folder: Path, progress: Progress
) -> tuple[Verification, bool, int]:
    """Export the first `layers` layers beside `folder` with the same options, and verify that export.

    Returns the result, with status `partial`, whether rows may be padded, and the peak of memory.
    """
    from topw_deploy.export.verification.run import verify_in_subprocess

    options = replace(options, num_hidden_layers=layers, neighbour_bound=False)
    first = folder.parent / "first-layers"
    first.mkdir()
    decoder, sampler = build_graph(source, options, SILENT)
    manifest = write_files(decoder, sampler, source, options, first, SILENT)
    save_manifest(first, structs.replace(manifest, verification=Verification(status="skipped")))
    verification, may_pad, peak = verify_in_subprocess(source, options, first, progress)
    checks = tuple(
        structs.replace(check, detail=f"{check.detail}; first {layers} layers") for check in verification.checks
    )
    # The median distance is that of likely tokens, and other tokens are likely after the first layers alone.
    return structs.replace(verification, status="partial", checks=checks, median_distance=None), may_pad, peak

"""Export a model: find it, build its graph, write it, verify it.

A verification holds the float32 torch model and two or three graph sessions in memory. If these do not fit, the first
layers are exported again, with the same options and weights, and verified instead of the whole.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from msgspec import structs

from topw_deploy.export.graph import BLOCK_BYTES, Decoder, initializer_tensors
from topw_deploy.export.native_functions import call_functions
from topw_deploy.export.options import ExportKeywords, ExportOptions, ExportReport, SamplerOptions, read_options
from topw_deploy.export.quantise import quantise
from topw_deploy.export.quantise.blocks import StoredRows
from topw_deploy.export.quantise.choice import Calibration
from topw_deploy.export.quantise.rewrite import least_onnxruntime, usual_type
from topw_deploy.export.quantise.rounding import NO_CALIBRATION, Quantisation
from topw_deploy.export.sampler.attach import attach_sampler
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.export.source.configuration import (
    copy_genai_configuration,
    read_generation_settings,
    write_configuration,
)
from topw_deploy.export.source.quantised import QuantisedFormat, quantised_format
from topw_deploy.export.source.resolve import Source, resolve
from topw_deploy.export.source.tokenizer import (
    COPIED_FILES,
    check_tokenizer,
    template_notices,
    tokens_beyond_notices,
    write_tokenizer,
)
from topw_deploy.export.write import (
    Slot,
    bytes_by_type,
    copy_data_files,
    data_slots,
    decoder_manifest,
    file_bytes_in,
    onnx_data_files,
    parameter_count,
    quantised_type,
    report_of,
    write_model,
    written_sizes,
)
from topw_deploy.folders import atomic_folder, check_free, require_space
from topw_deploy.install import major_minor
from topw_deploy.manifest import (
    MANIFEST_NAME,
    MODEL_NAME,
    NATIVE_ATTENTION,
    DecoderManifest,
    ModelFolder,
    Verification,
    save_manifest,
)
from topw_deploy.progress import SILENT, Progress, StageMemory, available_bytes, resident_bytes
from topw_deploy.text import decimal_size

_IR_VERSION = 11  # the first that has opset 23
_SMALL_FILES = 16 << 10  # approximate bytes of the manifest and the configuration
_QUANTISATION_PEAK = {"int4": 12.0, "int8": 6.5}  # bytes of memory per byte of codes (measured for int4)
VERIFIED_LAYERS = 4
"""Number of first layers that are verified if memory is short."""
# Memory of a verification by type of weights: a constant number of bytes for libraries, and bytes per parameter for the
# torch model and the sessions. Fitted to 52, 113 and 202 M parameters for float32 and to 52, 113 and 600 M for float16
# and int4, within 8.5 %; to one measurement for int8.
_VERIFICATION_MEMORY = {
    "float": (1_220_000_000, 11.2),
    "float16": (1_150_000_000, 10.6),
    "bfloat16": (680_000_000, 6.0),
    "int4": (1_150_000_000, 5.8),
    "int8": (1_150_000_000, 7.8),
}


@dataclass(frozen=True)
class Plan:
    """The resources that writing and verifying an export takes.

    files: name -> bytes, without some small files.
    needed_bytes: the free disk space that the export needs.
    slots: places of the weights in the data files.
    memory: stage -> estimated peak resident bytes.
    """

    files: dict[str, int]
    needed_bytes: int
    slots: list[Slot]
    memory: dict[str, int]


def plan_of(decoder: Decoder, source: Source, options: ExportOptions, folder: Path) -> Plan:
    """The plan for writing `decoder` to `folder`, which need not exist."""
    slots = data_slots(decoder.model, options.shard_bytes)
    files = written_sizes(decoder.model, slots)
    linked_bytes = 0
    for location, path in onnx_data_files(decoder.model, source).items():
        files[location] = path.resolve().stat().st_size
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if options.hard_link and path.resolve().stat().st_dev == existing.stat().st_dev:
            linked_bytes += files[location]
    for name in COPIED_FILES:
        if (source.tokenizer / name).is_file():
            files[name] = (source.tokenizer / name).stat().st_size
    memory = {"writing": resident_bytes() + max(map(_peak_bytes, slots), default=files[MODEL_NAME])}
    temporary_bytes = 0
    if options.verify:
        memory["verification"] = verification_bytes(decoder)
        temporary_bytes = first_layers_bytes(decoder, source, sum(files.values()))
    needed = sum(files.values()) - linked_bytes + temporary_bytes + _SMALL_FILES
    return Plan(files, needed, slots, memory)


def _peak_bytes(slot: Slot) -> int:
    """Estimated memory for writing one weight."""
    factor = _QUANTISATION_PEAK.get(quantised_type(slot.value) or "")
    return slot.length + 2 * min(slot.length, BLOCK_BYTES) if factor is None else round(factor * slot.length)


def verification_bytes(decoder: Decoder) -> int:
    """Estimated memory for a verification of all layers."""
    fixed, per_parameter = _VERIFICATION_MEMORY.get(decoder.info.weights_dtype, _VERIFICATION_MEMORY["float"])
    return fixed + round(per_parameter * parameter_count(decoder.model))


def layers_to_verify(decoder: Decoder, source: Source) -> int | None:
    """VERIFIED_LAYERS if there is too little memory to verify all layers, else None.

    None also for another exporter's decoder, which cannot be cut, and where the free memory is unknown.
    """
    free = available_bytes()  # 0 if unknown
    can_cut = source.onnx is None and decoder.info.num_layers > VERIFIED_LAYERS
    return VERIFIED_LAYERS if can_cut and 0 < free < verification_bytes(decoder) else None


def first_layers_bytes(decoder: Decoder, source: Source, file_bytes: int) -> int:
    """Disk space for an export of the first layers, if these are verified in place of the whole; else 0.

    file_bytes: size of the whole export.
    """
    if layers_to_verify(decoder, source) is None:
        return 0
    tables = 2 * max((int(tensor.nbytes) for tensor in initializer_tensors(decoder.model)), default=0)
    return min(file_bytes, file_bytes * VERIFIED_LAYERS // decoder.info.num_layers + tables)


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
    with export_folder(out, chosen) as folder:
        progress.say(f"Finding {model}")
        source = resolve(str(model), chosen.tokenizer, **chosen.hub)
        check_tokenizer(source.tokenizer)
        read_generation_settings(source)  # refuses wrong settings before the work
        if source.onnx is None:
            chosen = chosen.for_checkpoint(quantised_format(source.folder))
        with memory.stage("graph"):
            decoder, sampler = build_graph(source, chosen, progress)
        if chosen.dry_run:
            plan = plan_of(decoder, source, chosen, out)
            peaks = {**memory.peaks, **plan.memory}
            return report_of(decoder.model, out, started, plan.files, decoder=decoder, memory=peaks)
        with memory.stage("writing"):
            manifest = write_files(decoder, sampler, source, chosen, folder, progress)
        verification = verify(decoder, source, chosen, folder, progress, memory)
        save_manifest(folder, structs.replace(manifest, decoder=decoder.info, verification=verification))
        report = report_of(decoder.model, out, started, file_bytes_in(folder), verification, decoder, memory.peaks)
        progress.say(f"Moving the finished folder to {out}")
    return report


def export_folder(out: Path, options: SamplerOptions) -> AbstractContextManager[Path]:
    """The folder to write, which becomes `out`; in a dry run `out` itself, to which nothing is written."""
    if options.dry_run:
        check_free(out, marker=MANIFEST_NAME, kind=_KIND, overwrite=options.overwrite)
        return nullcontext(out)
    keep = isinstance(options, ExportOptions) and options.keep_failed
    return atomic_folder(out, marker=MANIFEST_NAME, kind=_KIND, overwrite=options.overwrite, keep_failed=keep)


def build_graph(source: Source, options: ExportOptions, progress: Progress) -> tuple[Decoder, SamplerSpec]:
    """The decoder, quantised if the options say so, with the sampler attached to it, and the sampler's description."""
    if source.onnx is not None:
        from topw_deploy.export.foreign import load_decoder

        options.check_for_onnx(source.onnx.name)
        progress.say(f"Reading the decoder {source.onnx}")
        decoder = load_decoder(source.onnx, source.tokenizer)
    else:
        from topw_deploy.export.traced_decoder import build_decoder  # imports torch, which ONNX decoders do not need

        stored = quantised_format(source.folder)
        options.check_for_checkpoint(source.id, stored)
        decoder = build_decoder(source, stored, options, progress)
        if options.quantisation is not None:
            progress.say(f"Quantising products and embedding to {options.quantisation.dtype}")
            _quantise(decoder, source, stored, options, options.quantisation, progress)
    progress.say(f"Attaching the sampler (top_m {options.top_w.top_m}, metric {options.top_w.metric})")
    sampler = attach_sampler(decoder, options, progress)
    if call_functions(decoder.model, decoder.opset) and "latent" not in decoder.info.state_bytes():
        decoder.info = structs.replace(decoder.info, attention=NATIVE_ATTENTION)
    return decoder, sampler


def _quantise(
    decoder: Decoder,
    source: Source,
    stored: QuantisedFormat | None,
    options: ExportOptions,
    scheme: Quantisation,
    progress: Progress,
) -> None:
    rows = StoredRows.of(source.folder)
    calibration: Calibration | None = None
    if scheme.bits == 4 and scheme.calibration != NO_CALIBRATION and rows is None:
        from topw_deploy.export.quantise.calibration import TextCalibration  # imports torch

        calibration = TextCalibration(decoder.module, source.tokenizer, scheme, options.trust_remote_code, progress)
    decoder.notices += quantise(
        decoder.model,
        scheme,
        rows,
        cut=options.num_hidden_layers is not None,
        calibration=calibration,
        estimate=options.dry_run,
        tensorrt=options.target == "tensorrt",
    )
    least = max(decoder.info.least_onnxruntime, least_onnxruntime(decoder.model.graph), key=major_minor)
    dtype = scheme.dtype
    if stored is not None and stored.gguf is not None:
        dtype = usual_type(decoder.model.graph) or dtype
        if types := stored.gguf.types_not_kept():
            decoder.notices.append(
                f"the GGUF file's {', '.join(types)} tensors were decoded and rounded again to {scheme.dtype}, because "
                "MatMulNBits cannot keep their codes"
            )
    decoder.info = structs.replace(
        decoder.info, weights_dtype=dtype, quantisation=scheme.as_dict(), least_onnxruntime=least
    )
    if stored is not None and not stored.integers and stored.gguf is None:
        decoder.notices.append(
            f"the checkpoint's {stored.name} weights were decoded and rounded again to {scheme.dtype}, because their "
            "codes are not integers that MatMulNBits could keep"
        )


def write_files(
    decoder: Decoder, sampler: SamplerSpec, source: Source, options: ExportOptions, folder: Path, progress: Progress
) -> DecoderManifest:
    """Write all files to `folder`, with a manifest that the runtime refuses because the verification is missing.

    Returns this manifest.
    """
    plan = plan_of(decoder, source, options, folder)
    require_space(folder.parent, plan.needed_bytes)
    progress.say(f"Writing {decimal_size(sum(plan.files.values()))}")
    data = sum(size for name, size in plan.files.items() if name not in (MODEL_NAME, *COPIED_FILES))
    with progress.bar(data, "B") as advance:
        copy_data_files(decoder.model, source, folder, advance, hard_link=options.hard_link)
        hashes = write_model(decoder.model, folder, advance, plan.slots)
    progress.say("Copying tokenizer and configuration")
    notices, tokens = write_tokenizer(source.tokenizer, folder, trust_remote_code=options.trust_remote_code)
    decoder.notices += notices
    decoder.notices += tokens_beyond_notices(folder, sampler.vocab_size)
    settings = write_configuration(source, folder, options.num_hidden_layers)
    decoder.notices += settings.notices
    decoder.notices += copy_genai_configuration(source, folder, options.with_logits)
    decoder.info = structs.replace(decoder.info, weights=bytes_by_type(decoder.model))
    manifest = decoder_manifest(decoder, sampler, source, options, folder, hashes)
    manifest = structs.replace(manifest, settings=settings.uses, source_tokens=tokens)
    save_manifest(folder, manifest)
    written = ModelFolder(folder, DecoderManifest, unfinished=True)
    decoder.notices += template_notices(source.tokenizer, written, trust_remote_code=options.trust_remote_code)
    return manifest


def verify(
    decoder: Decoder, source: Source, options: ExportOptions, folder: Path, progress: Progress, memory: StageMemory
) -> Verification:
    """Verify the written files, unless the options say not to. Forbid padding if padded rows are wrong or unchecked.

    If memory is short, exports the first layers beside `folder` with the same options, and verifies that export.
    """
    if not options.verify:
        if decoder.foreign:
            _forbid_padding(decoder, "was not checked for {side} padding")
        return Verification(status="skipped")
    from topw_deploy.export.verification.run import verify_in_subprocess

    layers = layers_to_verify(decoder, source)
    if layers is not None:
        decoder.notices.append(
            f"there is too little memory to verify all {decoder.info.num_layers} layers, which takes about "
            f"{decimal_size(verification_bytes(decoder))}: the first {layers} were exported alone and verified"
        )
        options = replace(options, num_hidden_layers=layers, neighbour_bound=False)
        folder = folder.parent / "first-layers"
        folder.mkdir()
        first, sampler = build_graph(source, options, SILENT)
        manifest = write_files(first, sampler, source, options, folder, SILENT)
        save_manifest(folder, structs.replace(manifest, verification=Verification(status="skipped")))
    progress.say("Verifying" if layers is None else f"Verifying the first {layers} layers")
    verification, may_pad, memory.peaks["verification"] = verify_in_subprocess(source, options, folder, progress)
    if layers is not None:
        checks = tuple(
            structs.replace(check, detail=f"{check.detail}; first {layers} layers") for check in verification.checks
        )
        # The median distance is that of likely tokens, and other tokens are likely after the first layers alone.
        verification = structs.replace(verification, status="partial", checks=checks, median_distance=None)
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

"""The export from end to end: find the source, build the graph, write it, verify it, rename it into place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from topw_deploy.errors import ExportError
from topw_deploy.export.build import Built, build
from topw_deploy.export.memory import StageMemory
from topw_deploy.export.plan import brought_files, plan_of
from topw_deploy.export.progress import Bar, Progress, no_bar
from topw_deploy.export.request import ExportReport, ExportRequest
from topw_deploy.export.resume.journal import Journal
from topw_deploy.export.resume.stages import Stages
from topw_deploy.export.resume.stamp import stamp_of_source
from topw_deploy.export.source.resolve import Source, refuse_special_files, resolve
from topw_deploy.export.verification.first_layers import layers_to_verify, verification_bytes, verify_first_layers
from topw_deploy.export.write.configuration import bring_genai_configuration, write_configuration
from topw_deploy.export.write.manifest import manifest_of, report_of, sizes_in
from topw_deploy.export.write.staging import StagedFolder, bring, check_free, require_space
from topw_deploy.export.write.tokenizer_files import bring_tokenizer, check_tokenizer
from topw_deploy.export.write.weights import bytes_by_type, write_model
from topw_deploy.manifest import DecoderManifest, Verification, save_manifest
from topw_deploy.sizes import decimal_size


def export_model(request: ExportRequest, progress: Progress = lambda _line: None, bar: Bar = no_bar) -> ExportReport:
    """Write the folder that `request` asks for, verified, in one piece; or raise and leave OUT as it was.

    Raises the errors of topw_deploy.errors: SourceError, UnsupportedModelError, TokenizerError and ParameterError
    before anything is written, ExportError for the writing, VerificationError if the graph disagrees with its source.
    """
    started = time.monotonic()
    check_free(request.output, request.overwrite)
    progress(f"Finding {request.model}")
    source = resolve(
        request.model,
        revision=request.revision,
        cache_dir=request.cache_dir,
        token=request.token,
        local_files_only=request.local_files_only,
        trust_remote_code=request.trust_remote_code,
    )
    tokenizer_folder = request.tokenizer or source.folder
    if request.tokenizer is not None and request.tokenizer.is_dir():
        refuse_special_files(request.tokenizer)
    check_tokenizer(tokenizer_folder)
    memory = StageMemory()
    if request.dry_run:
        return _dry_run(request, source, tokenizer_folder, started, memory, progress, bar)
    with StagedFolder(
        request.output, overwrite=request.overwrite, keep_failed=request.keep_failed, resume=request.resume
    ) as staged:
        stages = Stages(Journal(staged.workshop, progress), request, stamp_of_source(source, _data_files(source)))
        with memory.stage("graph"):
            built = build(request, source, progress, bar, stages)
        with memory.stage("writing"):
            manifest = _write(built, request, source, tokenizer_folder, staged.path, stages, progress, bar)
        verification = _verify(built, request, source, manifest, staged.path, stages, memory, progress)
        save_manifest(staged.path, replace(manifest, decoder=built.decoder.info, verification=verification))
        report = report_of(built, request, started, sizes_in(staged.path), memory.peaks, verification)
        progress(f"Moving it to {request.output}")
        staged.commit()
    return report


def _dry_run(
    request: ExportRequest,
    source: Source,
    tokenizer_folder: Path,
    started: float,
    memory: StageMemory,
    progress: Progress,
    bar: Bar,
) -> ExportReport:
    """The report on an export that is not made: its graph is, so that what follows can be foreseen."""
    with memory.stage("graph"):
        built = build(request, source, progress, bar)
    plan = plan_of(built, source, tokenizer_folder, Path(request.output), request)
    return report_of(built, request, started, plan.files, {**memory.peaks, **plan.memory})


def _data_files(source: Source) -> list[Path]:
    """The data files of an ONNX decoder."""
    if source.onnx is None:
        return []
    names = source.onnx.name
    return [path for path in source.onnx.parent.iterdir() if path.is_file() and path.name != names]


def _write(
    built: Built,
    request: ExportRequest,
    source: Source,
    tokenizer_folder: Path,
    folder: Path,
    stages: Stages,
    progress: Progress,
    bar: Bar,
) -> DecoderManifest:
    """All files of the export, under a provisional manifest, which does not load."""
    plan = plan_of(built, source, tokenizer_folder, folder, request)
    stages.clear(folder, plan.files)
    there = sum(min(size, plan.files.get(name, 0)) for name, size in sizes_in(folder).items())
    require_space(folder.parent, plan.needed - there)
    log = stages.log()
    progress(f"Writing {decimal_size(sum(plan.files.values()))}")
    with bar(plan.data, "B") as advance:
        _bring_data(built, source, folder, request.hard_link, stages, advance)
        try:
            write_model(built.decoder.model, folder, advance, plan.slots, log)
        except (MemoryError, ValueError) as error:
            raise ExportError(f"the graph cannot be written ({error}); report this model.") from error
    progress("Bringing tokenizer and configuration")
    built.notices += stages.small_files(
        tokenizer_folder,
        folder,
        lambda: bring_tokenizer(tokenizer_folder, folder, trust_remote_code=request.trust_remote_code),
    )
    write_configuration(source, tokenizer_folder, folder, request.num_hidden_layers)
    built.notices += bring_genai_configuration(source, folder, request.with_logits)
    built.decoder.info = replace(built.decoder.info, weights=bytes_by_type(built.decoder.model))
    manifest = manifest_of(built, request, source, folder, log.hashes)
    save_manifest(folder, manifest)
    return manifest


def _bring_data(
    built: Built, source: Source, folder: Path, hard_link: bool, stages: Stages, advance: Callable[[int], object]
) -> None:
    """Every data file that the graph's weights lie in already."""
    for location, path in brought_files(built, source).items():
        target = folder / location
        make = partial(bring, path, target, hard_link=hard_link, progress=advance)
        if not stages.copied(path, target, make, hard_link):
            advance(target.stat().st_size)


def _verify(
    built: Built,
    request: ExportRequest,
    source: Source,
    manifest: DecoderManifest,
    folder: Path,
    stages: Stages,
    memory: StageMemory,
    progress: Progress,
) -> Verification:
    """Compare the written folder with its source; what it may not do is taken from the decoder's description."""
    verification, may_pad = Verification(status="skipped"), not built.decoder.foreign
    if request.verify:
        from topw_deploy.export.verification import verify_in_subprocess

        def verify(wanted: ExportRequest, where: Path = folder) -> tuple[Verification, bool]:
            return verify_in_subprocess(where, source, wanted, progress, memory)

        layers, few = layers_to_verify(built, source), stages.journal.workshop / "first-layers"
        if layers is None:
            progress("Verifying")
            verification, may_pad = stages.verified(manifest, partial(verify, request))
        else:
            built.notices.append(
                f"memory does not suffice to verify all {built.decoder.info.num_layers} layers, which takes about "
                f"{decimal_size(verification_bytes(built))}: the first {layers} were exported alone and verified"
            )
            progress(f"Verifying the first {layers} layers")
            checked = partial(verify_first_layers, request, layers, few, export_model, partial(verify, where=few))
            verification, may_pad = stages.verified(manifest, checked)
    info = built.decoder.info
    if (info.left_padding or info.right_padding) and not may_pad:
        side = "left" if info.left_padding else "right"
        built.decoder.info = replace(info, left_padding=False, right_padding=False)
        why = f"is wrong for rows padded on the {side}" if request.verify else f"was not checked for {side} padding"
        built.notices.append(f"this decoder {why}, so the prompts of a batch must have equal lengths")
    return verification

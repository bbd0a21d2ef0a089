"""The export pipeline: resolve, build, write, verify, rename into place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from topw_deploy.errors import ExportError, ParameterError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.graft.neighbour_bound import choose_measure
from topw_deploy.export.graft.sampler_node import graft
from topw_deploy.export.job import Job
from topw_deploy.export.plan import layers_to_verify, onnx_data_files, plan_of, verification_bytes
from topw_deploy.export.quantise import quantise
from topw_deploy.export.quantise.experts import least_onnxruntime
from topw_deploy.export.quantise.stored_rows import StoredRows
from topw_deploy.export.request import ExportReport, ExportRequest
from topw_deploy.export.resume.finished import FinishedStages, stamp_of_source
from topw_deploy.export.resume.journal import Journal
from topw_deploy.export.source.quantised import quantised_format
from topw_deploy.export.source.resolve import Source, refuse_special_files, resolve
from topw_deploy.export.tail import TailSpec
from topw_deploy.export.write.configuration import copy_genai_configuration, write_configuration
from topw_deploy.export.write.manifest import decoder_manifest, decoder_report, sizes_in
from topw_deploy.export.write.staging import StagedFolder, check_free, copy_file, require_space
from topw_deploy.export.write.tokenizer_files import check_tokenizer, write_tokenizer
from topw_deploy.export.write.weights import bytes_by_type, write_model
from topw_deploy.manifest import DecoderManifest, Verification, save_manifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sizes import decimal_size
from topw_deploy.versions import release


def export_model(request: ExportRequest, progress: Progress = SILENT) -> ExportReport:
    """Write and verify the folder that `request` describes. On error, `output` is unchanged.

    Raises SourceError, UnsupportedModelError, TokenizerError or ParameterError before writing; ExportError if writing
    fails; VerificationError if the graph is wrong.
    """
    started = time.monotonic()
    check_free(request.output, request.overwrite)
    source = _find_source(request, progress)
    if request.dry_run:
        job = Job(request, source, FinishedStages(Journal(None), request), progress, started=started)
        return _dry_run(job)
    with StagedFolder(
        request.output, overwrite=request.overwrite, keep_failed=request.keep_failed, resume=request.resume
    ) as staged:
        finished = FinishedStages(Journal(staged.workspace, progress.say), request, stamp_of_source(source))
        job = Job(request, source, finished, progress, started=started)
        decoder, manifest = _make(job, staged.path)
        decoder, verification = _verify(job, decoder, manifest, staged)
        save_manifest(staged.path, replace(manifest, decoder=decoder.info, verification=verification))
        report = decoder_report(job, decoder, sizes_in(staged.path), job.memory.peaks, verification)
        progress.say(f"Moving the finished folder to {request.output}")
        staged.commit()
    return report


def _find_source(request: ExportRequest, progress: Progress) -> Source:
    progress.say(f"Finding {request.model}")
    source = resolve(request.model, request.hub)
    if request.tokenizer is not None and request.tokenizer.is_dir():
        refuse_special_files(request.tokenizer)
    check_tokenizer(request.tokenizer or source.folder)
    return source


def _dry_run(job: Job) -> ExportReport:
    with job.memory.stage("graph"):
        decoder, _ = _make_graph(job)
    plan = plan_of(job, decoder, job.request.output)
    return decoder_report(job, decoder, plan.files, {**job.memory.peaks, **plan.memory})


def _make(job: Job, folder: Path) -> tuple[Decoder, DecoderManifest]:
    with job.memory.stage("graph"):
        decoder, sampler = _make_graph(job)
    with job.memory.stage("writing"):
        return _write(job, decoder, sampler, folder)


def _make_graph(job: Job) -> tuple[Decoder, TailSpec]:
    request, progress = job.request, job.progress
    decoder = _read_decoder(job, job.source.onnx) if job.source.onnx is not None else _trace_decoder(job)
    sampler = request.sampler
    progress.say(f"Grafting the sampler (top_m {sampler.options.top_m}, metric {sampler.options.metric})")
    measure = choose_measure(sampler.neighbour_bound, request.dry_run, progress)
    if sampler.neighbour_bound:
        measure = job.finished.measured(measure)
    return graft(decoder, sampler, measure)


def _read_decoder(job: Job, file: Path) -> Decoder:
    from topw_deploy.export.foreign.load import load_decoder

    job.request.check_for_onnx(file.name)
    job.progress.say(f"Reading the decoder {file}")
    return load_decoder(file, job.tokenizer_folder)


def _trace_decoder(job: Job) -> Decoder:
    weights = job.request.weights
    if weights.hard_link:
        raise ParameterError(
            "hard_link shares the data files of an ONNX decoder, but this model is a checkpoint, whose weights are "
            "written anew; leave --hard-link out.",
            "hard_link",
        )
    from topw_deploy.export.traced_decoder import traced_decoder

    if weights.quantisation is None:
        return traced_decoder(job)
    stored = quantised_format(job.source.folder)
    if stored is not None and stored.integers and weights.torch_dtype != "float32":
        raise ParameterError(
            f"compute_dtype is {weights.compute_dtype!r}, but {job.source.id} holds {stored.name} "
            "codes, which can be kept only with compute_dtype 'fp32'; leave --compute-dtype out.",
            "compute_dtype",
        )
    decoder = traced_decoder(job)
    chosen = weights.quantisation
    job.progress.say(f"Quantising products and embedding to {chosen.dtype}")
    rows = StoredRows.of(job.source.folder)
    notices = quantise(decoder.model, chosen, rows, cut=job.request.graph.num_hidden_layers is not None)
    if stored is not None and not stored.integers:
        notices.append(
            f"the checkpoint's {stored.name} weights were decoded and rounded again to {chosen.dtype}, as their codes "
            "are no integers that MatMulNBits could keep"
        )
    least = max(decoder.info.least_onnxruntime, least_onnxruntime(decoder.model.graph), key=release)
    info = replace(decoder.info, weights_dtype=chosen.dtype, quantisation=chosen.as_dict(), least_onnxruntime=least)
    return replace(decoder, info=info).noting(*notices)


def _write(job: Job, decoder: Decoder, sampler: TailSpec, folder: Path) -> tuple[Decoder, DecoderManifest]:
    """Write all files with a provisional manifest, which the runtime refuses."""
    request, finished, progress = job.request, job.finished, job.progress
    plan = plan_of(job, decoder, folder)
    finished.clear(folder, plan.files)
    there = sum(min(size, plan.files.get(name, 0)) for name, size in sizes_in(folder).items())
    require_space(folder.parent, plan.needed - there)
    log = finished.data_log()
    progress.say(f"Writing {decimal_size(sum(plan.files.values()))}")
    with progress.bar(plan.data, "B") as advance:
        _copy_data(job, decoder, folder, advance)
        try:
            write_model(decoder.model, folder, advance, plan.slots, log)
        except (MemoryError, ValueError) as error:
            raise ExportError(f"the graph cannot be written ({error}); report this model.") from error
    progress.say("Copying tokenizer and configuration")
    tokenizer = job.tokenizer_folder
    remote_code = request.hub.trust_remote_code
    notices = finished.tokenizer_files(
        tokenizer, folder, partial(write_tokenizer, tokenizer, folder, trust_remote_code=remote_code)
    )
    write_configuration(job.source, tokenizer, folder, request.graph.num_hidden_layers)
    notices = [*notices, *copy_genai_configuration(job.source, folder, request.sampler.with_logits)]
    info = replace(decoder.info, weights=bytes_by_type(decoder.model))
    decoder = replace(decoder, info=info).noting(*notices)
    manifest = decoder_manifest(job, decoder, sampler, folder, log.hashes)
    save_manifest(folder, manifest)
    return decoder, manifest


def _copy_data(job: Job, decoder: Decoder, folder: Path, advance: Callable[[int], object]) -> None:
    hard_link = job.request.weights.hard_link
    for location, path in onnx_data_files(job, decoder).items():
        target = folder / location
        copy = partial(copy_file, path, target, hard_link=hard_link, progress=advance)
        if not job.finished.copied(path, target, copy, hard_link):
            advance(target.stat().st_size)


def _verify(
    job: Job, decoder: Decoder, manifest: DecoderManifest, staged: StagedFolder
) -> tuple[Decoder, Verification]:
    """Verify the written files; if only padding fails, the returned decoder does not allow it."""
    verification, may_pad = Verification(status="skipped"), not decoder.foreign
    if job.request.verify:
        from topw_deploy.export.verification import verify_in_subprocess

        layers = layers_to_verify(job, decoder)
        if layers is None:
            job.progress.say("Verifying")
            verify = partial(verify_in_subprocess, job, staged.path)
        else:
            decoder = decoder.noting(
                f"there is too little memory to verify all {decoder.info.num_layers} layers, which takes about "
                f"{decimal_size(verification_bytes(decoder))}: the first {layers} were exported alone and verified"
            )
            job.progress.say(f"Verifying the first {layers} layers")
            verify = partial(_verify_first_layers, job, layers, staged.workspace / "first-layers")
        verification, may_pad = job.finished.verified(manifest, verify)
    info = decoder.info
    if (info.left_padding or info.right_padding) and not may_pad:
        side = "left" if info.left_padding else "right"
        why = f"is wrong for rows padded on the {side}" if job.request.verify else f"was not checked for {side} padding"
        decoder = replace(decoder, info=replace(info, left_padding=False, right_padding=False)).noting(
            f"this decoder {why}, so the prompts of a batch must have equal lengths"
        )
    return decoder, verification


def _verify_first_layers(job: Job, layers: int, folder: Path) -> tuple[Verification, bool]:
    from topw_deploy.export.verification import verify_in_subprocess

    shutil.rmtree(folder, ignore_errors=True)  # from an interrupted attempt
    request = replace(
        job.request,
        output=folder,
        graph=replace(job.request.graph, num_hidden_layers=layers),
        sampler=replace(job.request.sampler, neighbour_bound=False),
    )
    fewer = Job(request, job.source, FinishedStages(Journal(None), request))
    with StagedFolder(folder) as staged:
        _, manifest = _make(fewer, staged.path)
        save_manifest(staged.path, replace(manifest, verification=Verification(status="skipped")))
        staged.commit()
    verification, may_pad = verify_in_subprocess(replace(fewer, progress=job.progress, memory=job.memory), folder)
    checks = tuple(replace(check, detail=f"{check.detail}; first {layers} layers") for check in verification.checks)
    # Other tokens are likely in the first layers alone than in the whole model.
    return replace(verification, status="partial", checks=checks, median_distance=None), may_pad

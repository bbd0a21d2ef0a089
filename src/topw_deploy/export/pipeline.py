"""The stages of an export: find the source, build the graph, write files, verify them, rename the folder into place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from topw_deploy.errors import ExportError, ParameterError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.job import Job
from topw_deploy.export.plan import layers_to_verify, onnx_data_files, plan_of, verification_bytes
from topw_deploy.export.quantise import quantise
from topw_deploy.export.quantise.experts import least_onnxruntime
from topw_deploy.export.quantise.scheme import Quantisation
from topw_deploy.export.quantise.stored_rows import StoredRows
from topw_deploy.export.request import ExportReport, ExportRequest
from topw_deploy.export.resume.finished_stages import FinishedStages, stamp_of_source
from topw_deploy.export.resume.journal import Journal
from topw_deploy.export.sampler.attach import attach_sampler
from topw_deploy.export.sampler.neighbour_bound import choose_measure
from topw_deploy.export.sampler.spec import SamplerSpec
from topw_deploy.export.source.quantised import quantised_format
from topw_deploy.export.source.resolve import Source, refuse_special_files, resolve
from topw_deploy.export.write.configuration import copy_genai_configuration, write_configuration
from topw_deploy.export.write.manifest import decoder_manifest, decoder_report, file_bytes_in
from topw_deploy.export.write.staging import StagedFolder, check_free, copy_file, require_space
from topw_deploy.export.write.tokenizer_files import check_tokenizer, write_tokenizer
from topw_deploy.export.write.weights import bytes_by_type, write_model
from topw_deploy.install import major_minor
from topw_deploy.manifest import DecoderManifest, Verification, save_manifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.text import decimal_size


def export_model(request: ExportRequest, progress: Progress = SILENT) -> ExportReport:
    """Write and verify the folder that `request` describes. If it fails, `request.output` is unchanged.

    Raises SourceError, UnsupportedModelError, TokenizerError or ParameterError before anything is written, ExportError
    if writing fails, and VerificationError if the written graph is wrong.
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
        decoder, manifest = _build_and_write(job, staged.path)
        decoder, verification = _verify(job, decoder, manifest, staged)
        save_manifest(staged.path, structs.replace(manifest, decoder=decoder.info, verification=verification))
        report = decoder_report(job, decoder, file_bytes_in(staged.path), job.memory.peaks, verification)
        progress.say(f"Moving the finished folder to {request.output}")
        staged.commit()
    return report


def _find_source(request: ExportRequest, progress: Progress) -> Source:
    """The source of the model. Raises SourceError or TokenizerError without a tokenizer that can be copied."""
    progress.say(f"Finding {request.model}")
    source = resolve(request.model, request.hub)
    if request.tokenizer is not None and request.tokenizer.is_dir():
        refuse_special_files(request.tokenizer)
    check_tokenizer(request.tokenizer or source.folder)
    return source


def _dry_run(job: Job) -> ExportReport:
    """Build the graph, and report the sizes of the files and the memory of the stages that would follow."""
    with job.memory.stage("graph"):
        decoder, _ = _build_graph(job)
    plan = plan_of(job, decoder, job.request.output)
    return decoder_report(job, decoder, plan.files, {**job.memory.peaks, **plan.memory})


def _build_and_write(job: Job, folder: Path) -> tuple[Decoder, DecoderManifest]:
    """Build the graph and write all files to `folder`, with a manifest that the runtime refuses."""
    with job.memory.stage("graph"):
        decoder, sampler = _build_graph(job)
    with job.memory.stage("writing"):
        return _write(job, decoder, sampler, folder)


def _build_graph(job: Job) -> tuple[Decoder, SamplerSpec]:
    """The decoder with the sampler attached to it, and the sampler's description."""
    request, progress = job.request, job.progress
    decoder = _load_decoder(job, job.source.onnx) if job.source.onnx is not None else _build_decoder(job)
    sampler = request.sampler
    progress.say(f"Grafting the sampler (top_m {sampler.options.top_m}, metric {sampler.options.metric})")
    measure = choose_measure(sampler.neighbour_bound, request.dry_run, progress)
    if sampler.neighbour_bound:
        measure = job.finished.keep_measurement(measure)
    return attach_sampler(decoder, sampler, measure)


def _load_decoder(job: Job, file: Path) -> Decoder:
    """Read the ONNX file `file`, a decoder that another exporter made."""
    from topw_deploy.export.foreign.load import load_decoder

    job.request.check_for_onnx(file.name)
    job.progress.say(f"Reading the decoder {file}")
    return load_decoder(file, job.tokenizer_folder)


def _build_decoder(job: Job) -> Decoder:
    """The decoder of a checkpoint, quantised if the request says so."""
    weights = job.request.weights
    if weights.hard_link:
        raise ParameterError(
            "hard_link shares the data files of an ONNX decoder, but this model is a checkpoint, whose weights are "
            "written anew; leave --hard-link out.",
            "hard_link",
        )
    from topw_deploy.export.traced_decoder import build_decoder

    if weights.quantisation is None:
        return build_decoder(job)
    stored = quantised_format(job.source.folder)
    if stored is not None and stored.integers and weights.torch_dtype != "float32":
        raise ParameterError(
            f"compute_dtype is {weights.compute_dtype!r}, but {job.source.id} holds {stored.name} "
            "codes, which can be kept only with compute_dtype 'fp32'; leave --compute-dtype out.",
            "compute_dtype",
        )
    decoder = _quantise_decoder(job, build_decoder(job), weights.quantisation)
    if stored is None or stored.integers:
        return decoder
    return decoder.with_notices(
        f"the checkpoint's {stored.name} weights were decoded and rounded again to {weights.quantisation.dtype}, "
        "because their codes are not integers that MatMulNBits could keep"
    )


def _quantise_decoder(job: Job, decoder: Decoder, options: Quantisation) -> Decoder:
    """Quantise the weights of `decoder` in place. Returns a copy with another description."""
    job.progress.say(f"Quantising products and embedding to {options.dtype}")
    rows = StoredRows.of(job.source.folder)
    notices = quantise(decoder.model, options, rows, cut=job.request.graph.num_hidden_layers is not None)
    least = max(decoder.info.least_onnxruntime, least_onnxruntime(decoder.model.graph), key=major_minor)
    info = structs.replace(
        decoder.info, weights_dtype=options.dtype, quantisation=options.as_dict(), least_onnxruntime=least
    )
    return replace(decoder, info=info).with_notices(*notices)


def _write(job: Job, decoder: Decoder, sampler: SamplerSpec, folder: Path) -> tuple[Decoder, DecoderManifest]:
    """Write all files to `folder`, with a manifest that the runtime refuses because the verification is missing.

    Returns the decoder with its sizes and more notices, and this manifest.
    """
    request, finished, progress = job.request, job.finished, job.progress
    plan = plan_of(job, decoder, folder)
    finished.remove_other_files(folder, plan.files)
    written = sum(min(size, plan.files.get(name, 0)) for name, size in file_bytes_in(folder).items())
    require_space(folder.parent, plan.needed_bytes - written)
    log = finished.data_log()
    progress.say(f"Writing {decimal_size(sum(plan.files.values()))}")
    with progress.bar(plan.data_bytes, "B") as advance:
        _copy_data_files(job, decoder, folder, advance)
        try:
            write_model(decoder.model, folder, advance, plan.slots, log)
        except (MemoryError, ValueError) as error:
            raise ExportError(f"the graph cannot be written ({error}); report this model.") from error
    progress.say("Copying tokenizer and configuration")
    tokenizer = job.tokenizer_folder
    remote_code = request.hub.trust_remote_code
    notices = finished.write_tokenizer_once(
        tokenizer, folder, partial(write_tokenizer, tokenizer, folder, trust_remote_code=remote_code)
    )
    write_configuration(job.source, tokenizer, folder, request.graph.num_hidden_layers)
    notices = [*notices, *copy_genai_configuration(job.source, folder, request.sampler.with_logits)]
    info = structs.replace(decoder.info, weights=bytes_by_type(decoder.model))
    decoder = replace(decoder, info=info).with_notices(*notices)
    manifest = decoder_manifest(job, decoder, sampler, folder, log.hashes)
    save_manifest(folder, manifest)
    return decoder, manifest


def _copy_data_files(job: Job, decoder: Decoder, folder: Path, advance: Callable[[int], object]) -> None:
    """Copy or hard-link the data files of an ONNX decoder to `folder`.

    advance: receives the number of bytes written since its last call.
    """
    hard_link = job.request.weights.hard_link
    for location, path in onnx_data_files(job, decoder).items():
        target = folder / location
        copy = partial(copy_file, path, target, hard_link=hard_link, progress=advance)
        if not job.finished.copy_once(path, target, copy, hard_link):
            advance(target.stat().st_size)


def _verify(
    job: Job, decoder: Decoder, manifest: DecoderManifest, staged: StagedFolder
) -> tuple[Decoder, Verification]:
    """Verify the written files, unless the request says not to.

    Returns the decoder and the result. If padded rows are wrong or not checked, the returned decoder forbids padding.
    """
    verification, may_pad = Verification(status="skipped"), not decoder.foreign
    if job.request.verify:
        from topw_deploy.export.verification import verify_in_subprocess

        layers = layers_to_verify(job, decoder)
        if layers is None:
            job.progress.say("Verifying")
            verify = partial(verify_in_subprocess, job, staged.path)
        else:
            decoder = decoder.with_notices(
                f"there is too little memory to verify all {decoder.info.num_layers} layers, which takes about "
                f"{decimal_size(verification_bytes(decoder))}: the first {layers} were exported alone and verified"
            )
            job.progress.say(f"Verifying the first {layers} layers")
            verify = partial(_verify_first_layers, job, layers, staged.workspace / "first-layers")
        verification, may_pad = job.finished.verify_once(manifest, verify)
    return decoder if may_pad else _forbid_padding(decoder, verified=job.request.verify), verification


def _forbid_padding(decoder: Decoder, *, verified: bool) -> Decoder:
    """A copy that does not allow padded rows, with a notice if `decoder` allows them.

    verified: whether padded rows were found to be wrong, rather than not checked.
    """
    info = decoder.info
    if not info.left_padding and not info.right_padding:
        return decoder
    side = "left" if info.left_padding else "right"
    reason = f"is wrong for rows padded on the {side}" if verified else f"was not checked for {side} padding"
    return replace(decoder, info=structs.replace(info, left_padding=False, right_padding=False)).with_notices(
        f"this decoder {reason}, so the prompts of a batch must have equal lengths"
    )


def _verify_first_layers(job: Job, layers: int, folder: Path) -> tuple[Verification, bool]:
    """Export the first `layers` layers to `folder` with the same options, and verify that export.

    Returns the result, with status `partial`, and whether rows may be padded.
    """
    from topw_deploy.export.verification import verify_in_subprocess

    shutil.rmtree(folder, ignore_errors=True)  # from an interrupted attempt
    request = replace(
        job.request,
        output=folder,
        graph=replace(job.request.graph, num_hidden_layers=layers),
        sampler=replace(job.request.sampler, neighbour_bound=False),
    )
    first_layers = Job(request, job.source, FinishedStages(Journal(None), request))
    with StagedFolder(folder) as staged:
        _, manifest = _build_and_write(first_layers, staged.path)
        save_manifest(staged.path, structs.replace(manifest, verification=Verification(status="skipped")))
        staged.commit()
    verification, may_pad = verify_in_subprocess(
        replace(first_layers, progress=job.progress, memory=job.memory), folder
    )
    checks = tuple(
        structs.replace(check, detail=f"{check.detail}; first {layers} layers") for check in verification.checks
    )
    # The median distance is that of likely tokens, and other tokens are likely after the first layers alone.
    return structs.replace(verification, status="partial", checks=checks, median_distance=None), may_pad

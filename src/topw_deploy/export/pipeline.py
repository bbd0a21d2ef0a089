"""The export from end to end: find the source, build the graph, write it, verify it, rename it into place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from topw_deploy.errors import ExportError
from topw_deploy.export.build import Built, build
from topw_deploy.export.configuration import bring_genai_configuration, write_configuration
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.describe import manifest_of, report_of
from topw_deploy.export.folder import StagedFolder, bring, check_free, linkable, require_space
from topw_deploy.export.progress import Bar, Progress, no_bar
from topw_deploy.export.request import ExportReport, ExportRequest
from topw_deploy.export.source import Source, resolve
from topw_deploy.export.tokenizer_files import bring_tokenizer, check_tokenizer
from topw_deploy.export.weights import external_files, weight_bytes, write_model
from topw_deploy.manifest import Manifest, Verification, save_manifest


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
    check_tokenizer(tokenizer_folder)
    built = build(request, source, progress, bar)
    if request.dry_run:
        return report_of(built, request, started)
    with StagedFolder(request.output, overwrite=request.overwrite, keep_failed=request.keep_failed) as staged:
        require_space(staged.path.parent, _space_needed(built.decoder, source, staged.path, request.hard_link))
        manifest = _write(built, request, source, tokenizer_folder, staged.path, progress, bar)
        verification = _verify(built, request, source, staged.path, progress)
        save_manifest(staged.path, replace(manifest, decoder=built.decoder.info, verification=verification))
        report = report_of(built, request, started, staged.path, verification)
        staged.commit()
    return report


def _write(
    built: Built,
    request: ExportRequest,
    source: Source,
    tokenizer_folder: Path,
    folder: Path,
    progress: Progress,
    bar: Bar,
) -> Manifest:
    """All files of the export, under a provisional manifest, which does not load."""
    size = weight_bytes(built.decoder.model)
    progress(f"Writing {size / 1e6:.1f} MB of weights")
    with bar(size, "B") as advance:
        _write_graph(built.decoder, source, folder, request.hard_link, advance)
    built.notices += bring_tokenizer(tokenizer_folder, folder, trust_remote_code=request.trust_remote_code)
    write_configuration(source, tokenizer_folder, folder, request.num_hidden_layers)
    built.notices += bring_genai_configuration(source, folder, request.with_logits)
    manifest = manifest_of(built, request, source, folder)
    save_manifest(folder, manifest)
    return manifest


def _write_graph(
    decoder: Decoder, source: Source, folder: Path, hard_link: bool, advance: Callable[[int], object]
) -> None:
    """model.onnx, and every data file that its weights lie in already."""
    if source.onnx is not None:
        for location in external_files(decoder.model):
            bring(source.onnx.parent / location, folder / location, hard_link=hard_link, progress=advance)
    try:
        write_model(decoder.model, folder, advance)
    except (MemoryError, ValueError) as error:
        raise ExportError(f"the graph cannot be written ({error}); report this model.") from error


def _space_needed(decoder: Decoder, source: Source, folder: Path, hard_link: bool) -> int:
    inside = weight_bytes(decoder.model)
    if source.onnx is None or not hard_link:
        return inside
    outside = [source.onnx.parent / location for location in external_files(decoder.model)]
    linked = sum(path.resolve().stat().st_size for path in outside if linkable(path, folder))
    return max(inside - linked, 0)


def _verify(built: Built, request: ExportRequest, source: Source, folder: Path, progress: Progress) -> Verification:
    """Compare the written folder with its source; what it may not do is taken from the decoder's description."""
    verification, may_pad = Verification(status="skipped"), not built.decoder.foreign
    if request.verify:
        from topw_deploy.export.verification import verify_in_subprocess

        progress("Verifying")
        verification, may_pad = verify_in_subprocess(folder, source, request, progress)
    if built.decoder.info.left_padding and not may_pad:
        built.decoder.info = replace(built.decoder.info, left_padding=False)
        why = "is wrong for rows padded on the left" if request.verify else "was not checked for left padding"
        built.notices.append(f"this decoder {why}, so the prompts of a batch must have equal lengths")
    return verification

"""The export from end to end: resolve, trace or read, graft, write, verify, rename."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

import topw_deploy
from topw_deploy.errors import ExportError, ParameterError, UnsupportedModelError
from topw_deploy.export.configuration import write_configuration
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.embedding_node import find_embedding
from topw_deploy.export.folder import StagedFolder, bring, check_free, linkable, require_space
from topw_deploy.export.graft import graft
from topw_deploy.export.neighbour_bound import measure_for
from topw_deploy.export.progress import Bar, Progress, no_bar
from topw_deploy.export.request import DEFAULT_OPSET, DTYPES, ExportReport, ExportRequest
from topw_deploy.export.source import Source, resolve
from topw_deploy.export.tail import TailSpec
from topw_deploy.export.tokenizer_files import bring_tokenizer, check_tokenizer
from topw_deploy.export.weights import external_files, tidy, weight_bytes, write_model
from topw_deploy.manifest import (
    Manifest,
    SamplerInfo,
    TensorSpec,
    Verification,
    describe_files,
    save_manifest,
)

_LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


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
    notices: list[str] = []
    decoder = _decoder(source, request, progress, notices)
    progress(f"Grafting the sampler (top_m {request.options.top_m}, metric {request.options.metric})")
    measure = measure_for(request.neighbour_bound, request.dry_run, progress, bar)
    spec = graft(decoder, request.graft, measure)
    if not decoder.foreign:
        tidy(decoder.model, _table(decoder))
    if request.dry_run:
        return _report(request, decoder, notices, started)
    return _write(request, source, tokenizer_folder, decoder, spec, notices, started, progress, bar)


def _decoder(source: Source, request: ExportRequest, progress: Progress, notices: list[str]) -> Decoder:
    if source.onnx is not None:
        from topw_deploy.export.decoder_onnx import load_decoder

        for name in ("dtype", "opset", "num_hidden_layers"):
            if getattr(request, name) is not None:
                raise ParameterError(
                    f"{name} is {getattr(request, name)!r}, but {source.onnx.name} is an ONNX decoder that exists "
                    f"already; leave --{name.replace('_', '-')} out or export from the original model."
                )
        progress(f"Reading the decoder {source.onnx}")
        return load_decoder(source.onnx, request.tokenizer or source.folder)
    from topw_deploy.export.traced_decoder import traced_decoder

    return traced_decoder(
        source,
        dtype=DTYPES[request.dtype or "fp32"],
        opset=request.opset or DEFAULT_OPSET,
        num_hidden_layers=request.num_hidden_layers,
        trust_remote_code=request.trust_remote_code,
        progress=progress,
        notices=notices,
    )


def _table(decoder: Decoder) -> ir.Value | None:
    """The stored embedding table of a traced decoder, if it has one."""
    try:
        table = find_embedding(decoder.model.graph).data[0]
    except UnsupportedModelError:  # only the uniform metric gets here without a table
        return None
    return table if table.producer() is None else None


def _write(
    request: ExportRequest,
    source: Source,
    tokenizer_folder: Path,
    decoder: Decoder,
    spec: TailSpec,
    notices: list[str],
    started: float,
    progress: Progress,
    bar: Bar,
) -> ExportReport:
    with StagedFolder(request.output, overwrite=request.overwrite, keep_failed=request.keep_failed) as staged:
        require_space(staged.path.parent, _space_needed(decoder, source, staged.path, request.hard_link))
        progress(f"Writing {weight_bytes(decoder.model) / 1e6:.1f} MB of weights")
        with bar(weight_bytes(decoder.model), "B") as advance:
            _write_graph(decoder, source, staged.path, request.hard_link, advance)
        notices += bring_tokenizer(tokenizer_folder, staged.path, trust_remote_code=request.trust_remote_code)
        write_configuration(source, tokenizer_folder, staged.path, request.num_hidden_layers)
        manifest = _manifest(request, source, decoder, spec, staged.path)
        save_manifest(staged.path, manifest)
        verification, may_pad = Verification(status="skipped"), not decoder.foreign
        if request.verify:
            from topw_deploy.export.verification import verify_in_subprocess

            progress("Verifying")
            verification, may_pad = verify_in_subprocess(staged.path, source, request, progress)
        if decoder.info.left_padding and not may_pad:
            decoder.info = replace(decoder.info, left_padding=False)
            why = "is wrong for rows padded on the left" if request.verify else "was not checked for left padding"
            notices.append(f"this decoder {why}, so the prompts of a batch must have equal lengths")
        save_manifest(staged.path, replace(manifest, decoder=decoder.info, verification=verification))
        report = _report(request, decoder, notices, started, staged.path, verification)
        staged.commit()
    return report


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


def _manifest(request: ExportRequest, source: Source, decoder: Decoder, spec: TailSpec, folder: Path) -> Manifest:
    graph = decoder.model.graph
    inputs, outputs = tensor_specs(graph.inputs), tensor_specs(graph.outputs)
    return Manifest(
        kind="decoder",
        source={"id": source.id, "revision": source.revision, "route": source.route},
        libraries=library_versions(),
        opset={str(domain): int(version) for domain, version in decoder.model.opset_imports.items()},
        inputs=inputs,
        outputs=outputs,
        sampler=SamplerInfo(
            tail=spec.form,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            table_form=spec.embedding.form if spec.embedding else "",
            options=spec.options,
            outputs=tuple(o.name for o in outputs if not o.name.startswith("present.")),
            neighbour_bound=request.neighbour_bound,
        ),
        defaults=request.defaults,
        decoder=decoder.info,
        verification=Verification(status="provisional"),
        files=describe_files(folder, [str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()]),
    )


def tensor_specs(values: object) -> tuple[TensorSpec, ...]:
    """Graph inputs or outputs as the manifest lists them."""
    specs = []
    for value in values:  # type: ignore[attr-defined]
        shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
        specs.append(TensorSpec(value.name, value.dtype.name.lower(), shape))
    return tuple(specs)


def library_versions() -> dict[str, str]:
    """This package's version and those of the libraries an export depends on, as far as installed."""
    versions = {"topw_deploy": topw_deploy.__version__}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _report(
    request: ExportRequest,
    decoder: Decoder,
    notices: list[str],
    started: float,
    folder: Path | None = None,
    verification: Verification | None = None,
) -> ExportReport:
    graph = decoder.model.graph
    files = [f for f in folder.rglob("*") if f.is_file()] if folder is not None else []
    return ExportReport(
        output=Path(request.output),
        dry_run=request.dry_run,
        model_type=decoder.info.model_type,
        inputs=tensor_specs(graph.inputs),
        outputs=tensor_specs(graph.outputs),
        nodes=len(graph),
        weight_bytes=weight_bytes(decoder.model),
        file_bytes=sum(f.stat().st_size for f in files) or weight_bytes(decoder.model),
        files=tuple(sorted(str(f.relative_to(folder)) for f in files)) if folder is not None else (),
        seconds=time.monotonic() - started,
        verification=verification or Verification(status="skipped"),
        notices=tuple(notices),
    )

"""The sampler without a decoder: a model that takes logits and answers tokens (`topw export-sampler`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import ParameterError, VerificationError
from topw_deploy.export.graft.neighbour_bound import Measure, measure_for, no_bound
from topw_deploy.export.graft.sampler_node import add_sampler_node, install_function, sampler_inputs
from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.progress import Bar, Progress, no_bar
from topw_deploy.export.request import DEFAULT_OPSET, ExportReport, check_bound
from topw_deploy.export.source.embedding_table import embeddings_of_file, embeddings_of_folder
from topw_deploy.export.source.resolve import Source, resolve
from topw_deploy.export.tail import GEOMETRY_INPUTS, TailSpec, plain_gather
from topw_deploy.export.write.libraries import library_versions
from topw_deploy.export.write.manifest import tensor_specs
from topw_deploy.export.write.staging import StagedFolder, check_free, require_space
from topw_deploy.export.write.weights import weight_bytes, write_model
from topw_deploy.manifest import SamplerInfo, SamplerManifest, Verification, describe_files, save_manifest
from topw_deploy.sampling import Geometry, as_float32
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters
from topw_deploy.sizes import decimal_size

_ROWS_VERIFIED = 4


@dataclass(frozen=True, kw_only=True)
class SamplerRequest:
    """All that `topw export-sampler` can be told.

    output: the folder to write.
    model: whose input embeddings to take (hub id, folder or `demo`), or embeddings: a .npy file with the table
    [tokens, hidden]; neither for the `uniform` metric, which then needs vocab_size.
    vocab_size: width of the logits; by default the table's rows, of which it must have at least so many.
    options: baked; defaults: parameters of a request that names none; tail: form of the function's body; opset: 18-24.
    neighbour_bound: measure how near each token's nearest other is, and store it (export/graft/neighbour_bound.py).
    verify: compare the written sampler with the reference before the folder appears.
    Raises ParameterError unless exactly one source of the vocabulary is named, for defaults that float32 cannot hold,
    and for a bound under `uniform`.
    """

    output: Path
    model: str | None = None
    embeddings: Path | None = None
    vocab_size: int | None = None
    options: TopWOptions = field(default_factory=TopWOptions)
    defaults: TopWParameters = field(default_factory=TopWParameters)
    tail: str = "portable"
    opset: int = DEFAULT_OPSET
    with_mass: bool = False
    with_keep_mask: bool = False
    neighbour_bound: bool = False
    overwrite: bool = False
    verify: bool = True
    dry_run: bool = False
    revision: str | None = None
    cache_dir: Path | None = None
    token: str | None = None
    local_files_only: bool = False

    def __post_init__(self) -> None:
        as_float32(self.defaults)  # what no graph can be handed is no default
        check_bound(self.neighbour_bound, self.options)
        if self.model is not None and self.embeddings is not None:
            raise ParameterError(
                "a model and an embeddings file are both given; give the one whose table is meant.", "embeddings"
            )
        if self.model is None and self.embeddings is None:
            if self.options.metric != "uniform":
                raise ParameterError(
                    f"metric {self.options.metric!r} needs token embeddings; give a model or --embeddings FILE.npy, "
                    "or use --metric uniform.",
                    "metric",
                )
            if self.vocab_size is None:
                raise ParameterError(
                    "the uniform metric without a model needs the width of the logits: --vocab-size.", "vocab_size"
                )


def export_sampler(request: SamplerRequest, progress: Progress = lambda _line: None, bar: Bar = no_bar) -> ExportReport:
    """Write the sampler-only folder that `request` asks for, in one piece; or raise and leave OUT as it was.

    The folder holds model.onnx (model.onnx_data beside it for a large table) and the manifest.
    Raises the errors of topw_deploy.errors; VerificationError if the graph disagrees with the reference.
    """
    started = time.monotonic()
    check_free(request.output, request.overwrite)
    table, source = _table(request)
    vocab = request.vocab_size if request.vocab_size is not None else len(table) if table is not None else 0
    if table is not None and len(table) < vocab:
        raise ParameterError(
            f"vocab_size is {vocab}, but the embedding table has {len(table)} rows and every token needs one; "
            "give the table of this vocabulary.",
            "vocab_size",
        )
    if request.options.metric == "uniform" or table is None:
        table, geometry = None, Geometry.uniform()
    else:
        progress(f"Measuring {vocab} embeddings")
        geometry = Geometry.from_embeddings(table[:vocab], request.options.metric)
    spec = sampler_spec(request, vocab, table)
    measure = measure_for(request.neighbour_bound, request.dry_run, progress, bar)
    model = sampler_model(spec, table, geometry, measure)
    if request.dry_run:
        return _report(request, model, started)
    with StagedFolder(request.output, overwrite=request.overwrite) as staged:
        require_space(staged.path.parent, weight_bytes(model))
        progress(f"Writing {decimal_size(weight_bytes(model))}")
        write_model(model, staged.path)
        manifest = _manifest(request, source, spec, model, staged.path)
        save_manifest(staged.path, manifest)
        if request.verify:
            progress("Verifying")
            manifest = replace(manifest, verification=_verify(staged.path, manifest, geometry))
        else:
            manifest = replace(manifest, verification=Verification(status="skipped"))
        save_manifest(staged.path, manifest)
        report = _report(request, model, started, staged.path, manifest.verification)
        staged.commit()
    return report


def sampler_spec(request: SamplerRequest, vocab_size: int, table: np.ndarray | None) -> TailSpec:
    """The tail that `request` asks for, over a table [rows, hidden] or none."""
    rows, hidden = (None, None) if table is None else table.shape
    return TailSpec(
        options=request.options,
        vocab_size=vocab_size,
        embedding=None if table is None else plain_gather(int(rows or 0), int(hidden or 0), ir.tensor(table).dtype),
        hidden_size=hidden,
        form=request.tail,
        opset=request.opset,
        with_mass=request.with_mass,
        with_keep_mask=request.with_keep_mask,
    )


def sampler_model(
    spec: TailSpec, table: np.ndarray | None, geometry: Geometry, measure: Measure = no_bound
) -> ir.Model:
    """The model: `logits` float32 [batch, vocab] and the sampler's inputs -> the sampler's outputs.

    table: the embeddings [>= vocab, hidden] as they are to be stored; geometry: their statistics;
    measure: makes the neighbour bound.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": spec.opset}, name="topw_sampler")
    editor = GraphEditor(graph, "topw")
    inputs = [editor.input("logits", ir.DataType.FLOAT, ["batch", spec.vocab_size]), *sampler_inputs(editor, "batch")]
    if table is not None and geometry.mean is not None and geometry.inverse_std is not None:
        bound = measure(geometry, spec.vocab_size)
        statistics: tuple[np.ndarray, ...] = (geometry.mean, geometry.inverse_std, bound)
        for name, values in zip(GEOMETRY_INPUTS, statistics, strict=True):
            inputs.append(editor.initializer(ir.tensor(values.astype(np.float32)), f"topw.{name}"))
        inputs.append(editor.initializer(ir.Tensor(table), "topw.embedding"))
    graph.outputs.extend(add_sampler_node(graph, spec, inputs, "batch"))
    model = ir.Model(graph, ir_version=ir_version(spec.opset), producer_name="topw_deploy")
    install_function(model, spec)
    return model


def ir_version(opset: int) -> int:
    """The lowest version of the file format that goes with `opset`: old runtimes refuse newer ones, onnxruntime 1.17
    those above 9. 10 serves every later opset, since nothing newer is used."""
    return 8 if opset < 19 else 9 if opset < 21 else 10


def _table(request: SamplerRequest) -> tuple[np.ndarray | None, Source]:
    """The embedding table and where it comes from; float64 becomes float32, which the graph computes in."""
    if request.embeddings is not None:
        table, source = embeddings_of_file(request.embeddings), Source(str(request.embeddings), "local", Path())
    elif request.model is not None:
        source = resolve(
            request.model,
            revision=request.revision,
            cache_dir=request.cache_dir,
            token=request.token,
            local_files_only=request.local_files_only,
        )
        table = embeddings_of_folder(source.folder)
    else:
        return None, Source("uniform", "none", Path())
    return (table.astype(np.float32) if table.dtype == np.float64 else table), source


def _manifest(
    request: SamplerRequest, source: Source, spec: TailSpec, model: ir.Model, folder: Path
) -> SamplerManifest:
    graph = model.graph
    outputs = tensor_specs(graph.outputs)
    return SamplerManifest(
        source={"id": source.id, "revision": source.revision, "route": "sampler"},
        libraries=library_versions(),
        opset={str(domain): int(version) for domain, version in model.opset_imports.items()},
        inputs=tensor_specs(graph.inputs),
        outputs=outputs,
        sampler=SamplerInfo(
            tail=spec.form,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            table_form=spec.embedding.form if spec.embedding is not None else "",
            options=spec.options,
            outputs=tuple(output.name for output in outputs),
            neighbour_bound=request.neighbour_bound,
        ),
        defaults=request.defaults,
        verification=Verification(status="provisional"),
        files=describe_files(folder, [file.name for file in folder.iterdir() if file.is_file()]),
    )


def _verify(folder: Path, manifest: SamplerManifest, geometry: Geometry) -> Verification:
    """Compare what was written with the reference on random logits; VerificationError names what differs."""
    from topw_deploy.export.verification.probe import SamplerProbe
    from topw_deploy.export.verification.results import Outcome
    from topw_deploy.export.verification.sampler_checks import bound_check, sampler_checks

    generator = np.random.default_rng(0)
    spread = generator.uniform(0.5, 3.0, (_ROWS_VERIFIED, 1))
    logits = (generator.standard_normal((_ROWS_VERIFIED, manifest.sampler.vocab_size)) * spread).astype(np.float32)
    results = [*sampler_checks(SamplerProbe(folder), manifest.sampler, manifest.defaults, geometry, logits)]
    if manifest.sampler.neighbour_bound:
        results.append(bound_check(folder, geometry, manifest.sampler.vocab_size))
    outcome = Outcome.of(results)
    for check in outcome.failed:
        raise VerificationError(
            f"{check.name} differ from the reference by {check.difference:g}, allowed are {check.bound:g} "
            f"({check.detail}); report this with the options used."
        )
    return outcome.verification()


def _report(
    request: SamplerRequest,
    model: ir.Model,
    started: float,
    folder: Path | None = None,
    verification: Verification | None = None,
) -> ExportReport:
    graph = model.graph
    files = sorted(file for file in folder.iterdir() if file.is_file()) if folder is not None else []
    size = weight_bytes(model)
    return ExportReport(
        output=Path(request.output),
        dry_run=request.dry_run,
        model_type="sampler",
        inputs=tensor_specs(graph.inputs),
        outputs=tensor_specs(graph.outputs),
        nodes=len(graph),
        weight_bytes=size,
        file_bytes=sum(file.stat().st_size for file in files) or size,
        files=tuple(file.name for file in files),
        seconds=time.monotonic() - started,
        verification=verification or Verification(status="skipped"),
    )

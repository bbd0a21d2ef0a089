"""Export the sampler without a decoder: logits in, tokens out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from msgspec import structs

from topw_deploy.errors import ParameterError, VerificationError
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.request import DEFAULT_OPSET, ExportReport, SamplerOptions, build_request
from topw_deploy.export.sampler.attach import add_sampler_inputs, add_sampler_node, install_function
from topw_deploy.export.sampler.neighbour_bound import Measure, choose_measure, no_bound
from topw_deploy.export.sampler.spec import GEOMETRY_INPUTS, SamplerSpec
from topw_deploy.export.source.arrays import embeddings_of_file, embeddings_of_folder, median_distance_in_file
from topw_deploy.export.source.resolve import HubOptions, Source, resolve
from topw_deploy.export.write.manifest import file_bytes_in, sampler_manifest, sampler_report
from topw_deploy.export.write.staging import StagedFolder, check_free, require_space
from topw_deploy.export.write.weights import weight_bytes, write_model
from topw_deploy.manifest import SamplerManifest, Verification, save_manifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import Geometry
from topw_deploy.text import decimal_size

_VERIFIED_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class SamplerRequest:
    """A request for an export of the sampler alone.

    output: the folder to write.
    model: a hub id, a folder or `demo` with the input embeddings.
    embeddings: a .npy file [tokens, hidden] with the input embeddings, instead of a model.
    vocab_size: width of the logits, by default the number of embeddings; required for the uniform metric without a
        model and embeddings.
    logits: a .npy file [steps, vocab_size] with the model's logits at steps of ordinary texts, from which the export
        computes the median distance of likely pairs; None leaves it unknown.
    opset: 18 to 24.
    overwrite, verify, dry_run: as in ExportRequest.
    Raises ParameterError for a model together with embeddings, for neither if the metric or the width needs one, for
    with_logits, and for logits with the uniform metric.
    """

    output: Path
    model: str | None = None
    embeddings: Path | None = None
    vocab_size: int | None = None
    logits: Path | None = None
    opset: int = DEFAULT_OPSET
    hub: HubOptions = field(default_factory=HubOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    overwrite: bool = False
    verify: bool = True
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.sampler.with_logits:
            raise ParameterError(
                "with_logits keeps a decoder's logits, but this export has no decoder; leave it out.", "with_logits"
            )
        if self.model is not None and self.embeddings is not None:
            raise ParameterError("a model and an embeddings file are both given; give only one of them.", "embeddings")
        metric = self.sampler.options.metric
        if self.logits is not None and metric == "uniform":
            raise ParameterError(
                "logits are for the median distance, which is 1 for the uniform metric; leave them out.", "logits"
            )
        if self.model is None and self.embeddings is None:
            if metric != "uniform":
                raise ParameterError(
                    f"metric {metric!r} needs token embeddings; give a model or --embeddings FILE.npy, "
                    "or use --metric uniform.",
                    "metric",
                )
            if self.vocab_size is None:
                raise ParameterError(
                    "the uniform metric without a model needs the width of the logits: --vocab-size.", "vocab_size"
                )


def sampler_request(**values: Any) -> SamplerRequest:
    """A SamplerRequest whose groups of options get their values from flat keywords."""
    return build_request(SamplerRequest, values)


def export_sampler(request: SamplerRequest, progress: Progress = SILENT) -> ExportReport:
    """Write and verify the folder that `request` describes. If it fails, `request.output` is unchanged.

    Raises errors of topw_deploy.errors, such as VerificationError if the written graph is wrong.
    """
    started, sampler = time.monotonic(), request.sampler
    check_free(request.output, request.overwrite)
    table, source = _embedding_table(request)
    vocab_size = _vocabulary_size(request, table)
    if sampler.options.metric == "uniform":
        table = None
    spec = sampler_spec(request, vocab_size, table)  # raises for options out of range, before the work below
    if table is None:
        geometry = Geometry.uniform()
    else:
        progress.say(f"Computing statistics of {vocab_size} embeddings")
        geometry = Geometry.from_embeddings(table[:vocab_size], sampler.options.metric)
    median = None if request.logits is None else median_distance_in_file(request.logits, geometry, vocab_size)
    model = sampler_model(spec, table, geometry, choose_measure(sampler.neighbour_bound, request.dry_run, progress))
    if request.dry_run:
        return sampler_report(request.output, model, started, {})
    with StagedFolder(request.output, overwrite=request.overwrite) as staged:
        require_space(staged.path.parent, weight_bytes(model))
        progress.say(f"Writing {decimal_size(weight_bytes(model))}")
        write_model(model, staged.path)
        manifest = sampler_manifest(model, source, spec, sampler, staged.path)
        save_manifest(staged.path, manifest)
        verification = Verification(status="skipped")
        if request.verify:
            progress.say("Verifying")
            verification = _verify(staged.path, manifest, geometry)
        verification = structs.replace(verification, median_distance=median)
        save_manifest(staged.path, structs.replace(manifest, verification=verification))
        report = sampler_report(request.output, model, started, file_bytes_in(staged.path), verification)
        staged.commit()
    return report


def sampler_spec(request: SamplerRequest, vocab_size: int, table: np.ndarray | None) -> SamplerSpec:
    """The description of the ONNX function. Raises ParameterError for options out of range.

    table: embeddings [>= vocab_size, hidden], or None.
    """
    rows, hidden = (None, None) if table is None else table.shape
    return SamplerSpec(
        options=request.sampler.options,
        vocab_size=vocab_size,
        embedding=None if table is None else plain_gather(int(rows or 0), int(hidden or 0), ir.tensor(table).dtype),
        hidden_size=hidden,
        branches=request.sampler.branches,
        opset=request.opset,
        with_mass=request.sampler.with_mass,
        with_keep_mask=request.sampler.with_keep_mask,
        rules=request.sampler.rules,
    )


def sampler_model(
    spec: SamplerSpec, table: np.ndarray | None, geometry: Geometry, measure: Measure = no_bound
) -> ir.Model:
    """The model of the sampler alone: `logits` float32 [batch, vocab] and the sampler's inputs -> its outputs.

    table: embeddings [>= vocab, hidden]; None for the uniform metric.
    geometry: the statistics of the embeddings.
    measure: computes the neighbour bound.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": spec.opset}, name="topw_sampler")
    editor = GraphEditor(graph, "topw")
    inputs = [
        editor.input("logits", ir.DataType.FLOAT, ["batch", spec.vocab_size]),
        *add_sampler_inputs(editor, "batch"),
    ]
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
    """The lowest IR version with `opset`, because older runtimes refuse newer ones: onnxruntime 1.17 those above 9."""
    return 8 if opset < 19 else 9 if opset < 21 else 10


def _vocabulary_size(request: SamplerRequest, table: np.ndarray | None) -> int:
    """The width of the logits. Raises ParameterError for more tokens than embeddings."""
    if table is None:
        return request.vocab_size or 0
    vocab_size = len(table) if request.vocab_size is None else request.vocab_size
    if len(table) < vocab_size:
        raise ParameterError(
            f"vocab_size is {vocab_size}, but the embedding table has {len(table)} rows and every token needs one; "
            "give the table of this vocabulary.",
            "vocab_size",
        )
    return vocab_size


def _embedding_table(request: SamplerRequest) -> tuple[np.ndarray | None, Source]:
    """The embeddings [tokens, hidden], or None, and their source. Casts float64 to float32, which the graph has."""
    if request.embeddings is not None:
        table, source = embeddings_of_file(request.embeddings), Source(str(request.embeddings), "local", Path())
    elif request.model is not None:
        source = resolve(request.model, request.hub)
        table = embeddings_of_folder(source.folder)
    else:
        return None, Source("uniform", "none", Path())
    return (table.astype(np.float32) if table.dtype == np.float64 else table), source


def _verify(folder: Path, manifest: SamplerManifest, geometry: Geometry) -> Verification:
    """Compare the sampler in `folder` with the reference, on random logits. Raises VerificationError if they differ."""
    from topw_deploy.export.verification.probe import SamplerProbe
    from topw_deploy.export.verification.results import Outcome
    from topw_deploy.export.verification.rule_checks import rule_checks
    from topw_deploy.export.verification.sampler_checks import check_bound, sampler_checks

    generator = np.random.default_rng(0)
    deviations = generator.uniform(0.5, 3.0, (_VERIFIED_ROWS, 1))
    rows = generator.standard_normal((_VERIFIED_ROWS, manifest.sampler.vocab_size))
    logits = (rows * deviations).astype(np.float32)
    probe = SamplerProbe(folder)
    results = [
        *sampler_checks(probe, manifest.sampler, manifest.defaults, geometry, logits),
        *rule_checks(probe, manifest.defaults, logits, names=manifest.sampler.rules),
    ]
    if manifest.sampler.neighbour_bound:
        results.append(check_bound(folder, geometry, manifest.sampler.vocab_size))
    outcome = Outcome.of(results)
    if outcome.failed:
        check = outcome.failed[0]
        raise VerificationError(
            f"{check.name} differ from the reference by {check.difference:g}, but at most {check.bound:g} is allowed "
            f"({check.detail}); report this with the options used."
        )
    return outcome.verification()

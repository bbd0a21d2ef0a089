"""Export the sampler without a decoder: logits in, tokens out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Unpack

import numpy as np
import onnx_ir as ir
from msgspec import structs

from topw_deploy.errors import SourceError, UnsupportedModelError, VerificationError, one_line
from topw_deploy.export.embedding import plain_gather
from topw_deploy.export.graph import GraphEditor
from topw_deploy.export.options import (
    DEFAULT_OPSET,
    ExportReport,
    SamplerKeywords,
    SamplerOptions,
    read_options,
    refuse,
)
from topw_deploy.export.pipeline import export_folder
from topw_deploy.export.sampler.attach import (
    NO_BOUND,
    add_geometry,
    add_sampler_inputs,
    add_sampler_node,
    bound_of,
    install_function,
    spec_of,
)
from topw_deploy.export.sampler.node import SamplerSpec
from topw_deploy.export.source.files import NUMPY_TYPES, gguf_path, stored_tensors
from topw_deploy.export.source.gguf import decode, read_gguf
from topw_deploy.export.source.gguf_models import TABLE
from topw_deploy.export.source.resolve import Source, resolve
from topw_deploy.export.write import file_bytes_in, manifest_fields, report_of, weight_bytes, write_model
from topw_deploy.folders import open_regular, require_space
from topw_deploy.manifest import SamplerManifest, Verification, save_manifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import Geometry, median_distance
from topw_deploy.text import decimal_size

_IR_VERSION = 10  # the first that has opset 23
_VERIFIED_ROWS = 4


class SamplerExportKeywords(SamplerKeywords, total=False):
    """The options of `export_sampler`; None means the default. See `SamplerExportOptions`."""

    embeddings: str | Path | None
    vocab_size: int | None
    logits: str | Path | None


@dataclass(frozen=True, kw_only=True)
class SamplerExportOptions(SamplerOptions):
    """The options of an export of the sampler alone.

    embeddings: a .npy file [tokens, hidden] with the input embeddings, instead of a model.
    vocab_size: width of the logits, by default the number of embeddings; required for the uniform metric without a
        model and embeddings.
    logits: a .npy file [steps, vocab_size] with the model's logits at steps of ordinary texts, from which the export
        computes the median distance of likely pairs; None leaves it unknown.
    opset: 18 to 24, by default 23.
    """

    keywords: ClassVar[type] = SamplerExportKeywords
    embeddings: str | Path | None = None
    vocab_size: int | None = None
    logits: str | Path | None = None

    def check_source(self, model: str | None) -> None:
        """Raise ParameterError for a model together with embeddings, for neither if the metric or the width needs one,
        and for logits with the uniform metric.
        """
        metric = self.top_w.metric
        has_table = model is not None or self.embeddings is not None
        refuse(
            model is not None and self.embeddings is not None,
            "embeddings and a model are both given; give only one of them.",
        )
        refuse(
            self.logits is not None and metric == "uniform",
            "logits are for the median distance, which is 1 for the uniform metric; leave them out.",
        )
        refuse(
            not has_table and metric != "uniform",
            f"metric {metric!r} needs token embeddings; give a model or --embeddings FILE.npy, or use --metric "
            "uniform.",
        )
        refuse(
            not has_table and self.vocab_size is None,
            "vocab_size is missing; without a model, the metric uniform needs the width of the logits.",
        )


def export_sampler(
    model: str | Path | None, out: str | Path, *, progress: Progress = SILENT, **options: Unpack[SamplerExportKeywords]
) -> ExportReport:
    """Write and verify the folder `out`, the sampler for the embeddings of `model`. If it fails, `out` is unchanged.

    model: a hub id, a folder or `tiny` with the input embeddings; None for the option `embeddings` or none.
    options: those of `topw export-sampler`, see SamplerExportOptions.
    Raises errors of topw_deploy.errors, such as VerificationError if the written graph is wrong.
    """
    chosen, out, started = read_options(SamplerExportOptions, options), Path(out), time.monotonic()
    chosen.check_source(None if model is None else str(model))
    with export_folder(out, chosen) as folder:
        graph, spec, geometry, source = _build(model, chosen, progress)
        if chosen.dry_run:
            return report_of(graph, out, started, {})
        median = None
        if chosen.logits is not None:
            median = median_distance_in_file(Path(chosen.logits), geometry, spec.vocab_size)
        require_space(folder.parent, weight_bytes(graph))
        progress.say(f"Writing {decimal_size(weight_bytes(graph))}")
        write_model(graph, folder)
        manifest = SamplerManifest(**manifest_fields(graph, source, "sampler", spec, chosen, folder, {}))
        save_manifest(folder, manifest)
        verification = Verification(status="skipped", median_distance=median)
        if chosen.verify:
            progress.say("Verifying")
            verification = _verify(folder, manifest, geometry, median)
        save_manifest(folder, structs.replace(manifest, verification=verification))
        return report_of(graph, out, started, file_bytes_in(folder), verification)


def _build(
    model: str | Path | None, options: SamplerExportOptions, progress: Progress
) -> tuple[ir.Model, SamplerSpec, Geometry, Source]:
    """The graph, its description, the embeddings' geometry and their source."""
    table, source = _embedding_table(model, options)
    count = 0 if table is None else len(table)
    vocab_size = count if options.vocab_size is None else options.vocab_size
    refuse(
        table is not None and count < vocab_size,
        f"vocab_size is {vocab_size}, but the embedding table has {count} rows and every token needs one; give the "
        "table of this vocabulary.",
    )
    if options.top_w.metric == "uniform":
        table = None
    embedding, hidden = None, None
    if table is not None:
        hidden = int(table.shape[1])
        embedding = plain_gather(count, hidden, ir.tensor(table).dtype)
    # Raises for options out of range, before the work below.
    spec = spec_of(options, vocab_size, embedding, hidden, options.opset or DEFAULT_OPSET)
    geometry = Geometry.uniform()
    if table is not None:
        progress.say(f"Computing statistics of {vocab_size} embeddings")
        geometry = Geometry.from_embeddings(table[:vocab_size], options.top_w.metric)
    bound = bound_of(geometry, vocab_size, options, progress)
    return sampler_model(spec, table, geometry, bound), spec, geometry, source


def sampler_model(
    spec: SamplerSpec, table: np.ndarray | None, geometry: Geometry, bound: np.ndarray = NO_BOUND
) -> ir.Model:
    """The model of the sampler alone: `logits` float32 [batch, vocab] and the sampler's inputs -> its outputs.

    table: embeddings [>= vocab, hidden]; None for the uniform metric.
    geometry: the statistics of the embeddings.
    bound: the neighbour bound, float32 [vocab] or [0].
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": spec.opset}, name="topw_sampler")
    editor = GraphEditor(graph, "topw")
    logits = editor.input("logits", ir.DataType.FLOAT, ["batch", spec.vocab_size])
    inputs = [logits, *add_sampler_inputs(editor, "batch")]
    if table is not None:
        inputs += [*add_geometry(editor, geometry, bound), editor.initializer(ir.Tensor(table), "topw.embedding")]
    graph.outputs.extend(add_sampler_node(graph, spec, inputs, "batch"))
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="topw_deploy")
    install_function(model, spec)
    return model


def _embedding_table(model: str | Path | None, options: SamplerExportOptions) -> tuple[np.ndarray | None, Source]:
    """The embeddings [tokens, hidden], or None, and their source. Casts float64 to float32, which the graph has."""
    file = options.embeddings
    if model is not None:
        source = resolve(str(model), **options.hub)
        table = embeddings_of_folder(source.folder)
    elif file is not None:
        table, source = embeddings_of_file(Path(file)), Source(str(file), "local", Path(), Path())
    else:
        return None, Source("uniform", "none", Path(), Path())
    return (table.astype(np.float32) if table.dtype == np.float64 else table), source


def _verify(folder: Path, manifest: SamplerManifest, geometry: Geometry, median: float | None) -> Verification:
    """Compare the sampler in `folder` with the reference, on random logits. Raises VerificationError if they differ."""
    from topw_deploy.export.verification.reference import SamplerProbe
    from topw_deploy.export.verification.run import failed_checks, record_of
    from topw_deploy.export.verification.sampler import check_bound, rule_checks, sampler_checks

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
    record = record_of(results)
    for check in failed_checks(record.checks):
        raise VerificationError(
            f"{check.name} differ from the reference by {check.difference:g}, but at most {check.bound:g} is allowed "
            f"({check.detail}); report this with the options used."
        )
    return structs.replace(record, median_distance=median)


MOST_STEPS = 4096
"""The maximum number of rows in a file of logits. Computing the median takes 32 kB per row."""
# Names of the embedding table in transformers' models, without prefixes.
_TABLE_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_TABLE_TYPES = ("F64", "F32", "F16", "BF16")


def embeddings_of_folder(folder: Path) -> np.ndarray:
    """Memory-map a checkpoint's input embeddings [rows, hidden].

    Raises SourceError for missing or damaged weights, UnsupportedModelError unless exactly one tensor has a usual name
    and a floating-point type.
    """
    path = gguf_path(folder)
    if path is not None:
        table = read_gguf(path).tensors[TABLE]  # `open_gguf` refuses a file without
        return _check_table(decode(table.raw(), table.kind), TABLE)
    tensors = stored_tensors(folder, _TABLE_NAMES)
    found = sorted(tensors)
    if len(found) != 1:
        which = f"{len(found)} ({', '.join(found)})" if found else "none"
        raise UnsupportedModelError(
            f"the input embeddings in {folder} are not clear: {which} have one of the usual names "
            f"({', '.join(_TABLE_NAMES)}); "
            "save the table as .npy and give it with --embeddings."
        )
    (name,) = found
    stored = tensors[name]
    if stored.dtype not in _TABLE_TYPES:
        raise UnsupportedModelError(
            f"the embedding table {name} is stored as {stored.dtype}, but must be one of {', '.join(_TABLE_TYPES)}; "
            "save the unquantised table as .npy and give it with --embeddings."
        )
    return _check_table(stored.array(), name)


def embeddings_of_file(path: Path) -> np.ndarray:
    """Memory-map a .npy table [rows, hidden]. Raises SourceError for other files."""
    return _check_table(map_array(path, "the embedding table"), str(path))


def _check_table(table: np.ndarray, name: str) -> np.ndarray:
    if table.ndim != 2 or 0 in table.shape or table.dtype not in [NUMPY_TYPES[kind] for kind in _TABLE_TYPES]:
        raise SourceError(
            f"{name} holds {table.dtype} of shape {tuple(table.shape)}, but must hold floating-point numbers of shape "
            "[tokens, hidden]; give such a table."
        )
    return table


def map_array(path: Path, content: str) -> np.ndarray:
    """Memory-map the array in a .npy file, read-only.

    content: a noun phrase for the messages, such as "the logits".
    Raises SourceError if the file is missing, is not a regular file or holds no array of numbers.
    """
    try:
        with open_regular(path, follow=True):  # numpy would wait for the writer of a named pipe
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist; give a .npy file with {content}.") from None
    except Exception as error:  # noqa: BLE001  # numpy also raises errors of Python's tokenizer
        raise SourceError(
            f"{path} is not a .npy file of numbers ({one_line(error, 200)}); save {content} with numpy.save."
        ) from None
    return array


def median_distance_in_file(path: Path, geometry: Geometry, vocab_size: int) -> float:
    """Return the median distance of likely pairs of tokens (sampling.geometry) over the steps in a .npy file.

    path: floating-point logits [steps, vocab_size], with 1 to MOST_STEPS steps.
    Raises SourceError for other files, and if no row has two likely tokens at a distance > 0.
    """
    rows = map_array(path, "the logits")
    if rows.ndim != 2 or rows.shape[1] != vocab_size or not 1 <= len(rows) <= MOST_STEPS or rows.dtype.kind != "f":
        raise SourceError(
            f"{path} holds {rows.dtype} of shape {tuple(rows.shape)}, but must hold floating-point logits of shape "
            f"[steps, {vocab_size}], with 1 to {MOST_STEPS} steps; give such logits."
        )
    found = median_distance(geometry, rows)
    if found is None:
        raise SourceError(
            f"the logits in {path} have no two likely tokens at a distance > 0 in any row; give a model's logits at "
            "steps of ordinary texts."
        )
    return found

"""Build the manifest and the report of an export."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from topw_deploy.errors import ManifestError, UnsupportedModelError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.options import ExportOptions, ExportReport, SamplerOptions
from topw_deploy.export.sampler.spec import OP_TYPE, SamplerSpec
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.write.weights import weight_bytes
from topw_deploy.folders import map_file
from topw_deploy.install import library_versions
from topw_deploy.manifest import (
    MODEL_NAME,
    DecoderManifest,
    EmbeddingTable,
    Lookup,
    SamplerInfo,
    SamplerManifest,
    StoredArray,
    TensorSpec,
    Verification,
    describe_files,
    manifest_from_json,
)

_MEAN, _INVERSE_STD, _TABLE = 14, 15, 17  # inputs of the sampler node
_LOOKUP = "GatherBlockQuantized"


def read_tables(folder: Path) -> tuple[EmbeddingTable | None, tuple[Lookup, ...]]:
    """Read `folder/model.onnx`.

    Returns (the sampler's embeddings, or None if they are not plain or block-quantised constants; lookups in uint8).
    """
    graph = ir.load(folder / MODEL_NAME).graph
    lookups = (_read_lookup(node) for node in graph if node.op_type == _LOOKUP)
    sampler = next((node for node in graph if node.op_type == OP_TYPE), None)
    table = None if sampler is None or len(sampler.inputs) <= _TABLE else _read_table(sampler, folder)
    return table, tuple(lookup for lookup in lookups if lookup is not None)


def _read_table(sampler: ir.Node, folder: Path) -> EmbeddingTable | None:
    form = sampler.attributes["table_form"].as_string() if "table_form" in sampler.attributes else ""
    values = [*sampler.inputs[_MEAN : _INVERSE_STD + 1], *sampler.inputs[_TABLE:]]
    arrays = [None if value is None else _stored(value, folder) for value in values]
    mean, inverse_std, rows, *others = arrays
    if mean is None or inverse_std is None or rows is None:
        return None
    if form.startswith("Gather("):
        transposed = _producer(sampler.inputs[_TABLE]) == "Transpose"
        return EmbeddingTable(rows=rows, mean=mean, inverse_std=inverse_std, transposed=transposed)
    if rows.dtype != "uint8" or "quantize_axis=1" not in form:
        return None
    settings = dict(pair.split("=") for pair in form.partition("(")[2].rstrip(")").split(","))
    return EmbeddingTable(
        rows=rows,
        mean=mean,
        inverse_std=inverse_std,
        bits=8 if settings["bits"] == "8" else 4,
        block_size=int(settings["block_size"]),
        scales=others[0],
        zero_points=others[1] if len(others) > 1 else None,
    )


def _stored(value: ir.Value, folder: Path) -> StoredArray | None:
    """Find the place of a constant's bytes; None if it is none."""
    tensor = _constant(value)
    if tensor is None or tensor.dtype.name.lower() not in ("float", "float16", "bfloat16", "uint8"):
        return None
    shape = tuple(tensor.shape.numpy())
    if len(shape) > 2:  # a tied head's codes [V, blocks, bytes]
        shape = (shape[0], math.prod(shape[1:]))
    if isinstance(tensor, ir.ExternalTensor):
        return StoredArray(str(tensor.location), tensor.offset or 0, tensor.dtype.name.lower(), shape)
    offset = map_file(folder / MODEL_NAME).find(tensor.tobytes())
    return None if offset < 0 else StoredArray(MODEL_NAME, offset, tensor.dtype.name.lower(), shape)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the constant behind a value, also behind Reshape and Transpose."""
    producer = value.producer()
    if producer is not None and producer.op_type in ("Reshape", "Transpose") and producer.inputs[0] is not None:
        return _constant(producer.inputs[0])
    return value.const_value


def _producer(value: ir.Value | None) -> str:
    producer = None if value is None else value.producer()
    return "" if producer is None else producer.op_type


def _read_lookup(node: ir.Node) -> Lookup | None:
    table = None if node.inputs[0] is None else _constant(node.inputs[0])
    if table is None or table.dtype != ir.DataType.UINT8:
        return None
    bits = node.attributes["bits"].as_int() if "bits" in node.attributes else 4
    return Lookup(
        block_size=node.attributes["block_size"].as_int() if "block_size" in node.attributes else 128,
        width=math.prod(table.shape.numpy()[1:]) * 8 // bits,
        has_zero_points=len(node.inputs) > 3 and node.inputs[3] is not None,
    )


def decoder_manifest(
    decoder: Decoder,
    sampler: SamplerSpec,
    source: Source,
    options: ExportOptions,
    folder: Path,
    known: dict[str, str],
) -> DecoderManifest:
    """Build the manifest of a decoder with its sampler, with the status "provisional".

    known: {file name: SHA-256} of files hashed while they were written.
    Raises UnsupportedModelError for a model that no valid manifest can describe, such as one with too many layers.
    """
    shared = _shared_fields(decoder.model, source, source.route, sampler, options, folder, known)
    manifest = DecoderManifest(**shared, decoder=decoder.info)
    try:
        manifest_from_json(manifest.to_json())
    except ManifestError as error:
        raise UnsupportedModelError(
            f"the export of {source.id} would not load ({str(error).partition(';')[0]}); correct the model's "
            "configuration."
        ) from None
    return manifest


def sampler_manifest(
    model: ir.Model, source: Source, sampler: SamplerSpec, options: SamplerOptions, folder: Path
) -> SamplerManifest:
    """Build the manifest of a sampler without decoder, with the status "provisional"."""
    return SamplerManifest(**_shared_fields(model, source, "sampler", sampler, options, folder, {}))


def decoder_report(
    decoder: Decoder,
    out: Path,
    started: float,
    sizes: dict[str, int],
    memory: dict[str, int],
    verification: Verification | None = None,
) -> ExportReport:
    """Build the report of an export, or of a dry run without `verification`.

    started: when the export began, by time.monotonic().
    sizes: bytes by file.
    memory: peak bytes by stage.
    """
    return ExportReport(
        output=out,
        dry_run=verification is None,
        model_type=decoder.info.model_type,
        file_bytes=sum(sizes.values()),
        files=() if verification is None else tuple(sorted(sizes)),
        seconds=time.monotonic() - started,
        verification=verification or Verification(status="skipped"),
        notices=tuple(decoder.notices),
        sizes=sizes,
        memory=memory,
        states=decoder.info.state_bytes(),
        **_graph_fields(decoder.model),
    )


def sampler_report(
    out: Path, model: ir.Model, started: float, sizes: dict[str, int], verification: Verification | None = None
) -> ExportReport:
    """Build the report of a sampler-only export. sizes: bytes by file; empty for a dry run."""
    return ExportReport(
        output=out,
        dry_run=not sizes,
        model_type="sampler",
        file_bytes=sum(sizes.values()) or weight_bytes(model),
        files=tuple(sorted(sizes)),
        seconds=time.monotonic() - started,
        verification=verification or Verification(status="skipped"),
        **_graph_fields(model),
    )


def file_bytes_in(folder: Path) -> dict[str, int]:
    """Return {path relative to `folder`: bytes} of all files in it."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def _shared_fields(
    model: ir.Model,
    source: Source,
    route: str,
    spec: SamplerSpec,
    options: SamplerOptions,
    folder: Path,
    known: dict[str, str],
) -> dict[str, Any]:
    outputs = _tensor_specs(model.graph.outputs)
    table, lookups = read_tables(folder)
    return {
        "source": {"id": source.id, "revision": source.revision, "route": route},
        "libraries": library_versions(),
        "opset": {str(domain): int(version) for domain, version in model.opset_imports.items()},
        "inputs": _tensor_specs(model.graph.inputs),
        "outputs": outputs,
        "sampler": SamplerInfo(
            branches=spec.branches,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            table_form=spec.embedding.form if spec.embedding is not None else "",
            options=spec.options,
            outputs=tuple(output.name for output in outputs if not output.name.startswith("present.")),
            neighbour_bound=options.neighbour_bound,
            rules=spec.rules,
            table=table,
        ),
        "lookups": lookups,
        "defaults": options.defaults,
        "default_beta": options.default_beta,
        "verification": Verification(status="provisional"),
        "files": describe_files(folder, list(file_bytes_in(folder)), known),
    }


def _graph_fields(model: ir.Model) -> dict[str, Any]:
    return {
        "inputs": _tensor_specs(model.graph.inputs),
        "outputs": _tensor_specs(model.graph.outputs),
        "nodes": len(model.graph),
        "weight_bytes": weight_bytes(model),
    }


def _tensor_specs(values: Iterable[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for value in values:
        shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
        specs.append(TensorSpec(value.name, value.dtype.name.lower(), shape))
    return tuple(specs)

"""The first half of an export: from a source to the finished graph in memory, its weights still where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx_ir as ir

from topw_deploy.errors import ParameterError, UnsupportedModelError
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.graft.embedding_node import find_embedding
from topw_deploy.export.graft.neighbour_bound import measure_for
from topw_deploy.export.graft.sampler_node import graft
from topw_deploy.export.progress import Bar, Progress
from topw_deploy.export.quantise import quantise
from topw_deploy.export.quantise.packed_rows import PackedRows
from topw_deploy.export.request import DEFAULT_OPSET, ExportRequest
from topw_deploy.export.resume.stages import Stages
from topw_deploy.export.source.packed.checkpoint import PackedCheckpoint
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.tail import TailSpec
from topw_deploy.export.write.weights import tidy
from topw_deploy.manifest import TARGETS

# What is asked of a trace, and cannot be of a decoder that exists.
_OF_A_TRACE = (
    "dtype", "compute_dtype", "opset", "kv", "target", "max_length", "num_hidden_layers", "max_shard_size"
)  # fmt: skip


@dataclass
class Built:
    """A decoder with its sampler, ready to be written; `notices`: what the user should know."""

    decoder: Decoder
    spec: TailSpec
    notices: list[str] = field(default_factory=list)


def build(request: ExportRequest, source: Source, progress: Progress, bar: Bar, stages: Stages | None = None) -> Built:
    """Trace or read the decoder of `source`, set the sampler onto it, tidy what was traced here.

    stages: what an interrupted export may have finished of it.
    Raises UnsupportedModelError and SourceError for what cannot be exported, ParameterError for what was asked of an
    ONNX decoder that exists already.
    """
    notices: list[str] = []
    decoder = _decoder(source, request, progress, notices, stages)
    progress(f"Grafting the sampler (top_m {request.options.top_m}, metric {request.options.metric})")
    measure = measure_for(request.neighbour_bound, request.dry_run, progress, bar)
    if stages is not None and request.neighbour_bound:
        measure = stages.measured(measure)
    spec = graft(decoder, request.graft, measure)
    if not decoder.foreign:
        tidy(decoder.model, _table(decoder))
    return Built(decoder, spec, notices)


def _decoder(
    source: Source, request: ExportRequest, progress: Progress, notices: list[str], stages: Stages | None
) -> Decoder:
    if source.onnx is not None:
        from topw_deploy.export.foreign.load import load_decoder

        for name in _OF_A_TRACE:
            if getattr(request, name) is not None:
                raise ParameterError(
                    f"{name} is {getattr(request, name)!r}, but {source.onnx.name} is an ONNX decoder that exists "
                    f"already; leave --{name.replace('_', '-')} out or export from the original model.",
                    name,
                )
        progress(f"Reading the decoder {source.onnx}")
        return load_decoder(source.onnx, request.tokenizer or source.folder, notices)
    if request.hard_link:
        raise ParameterError(
            "hard_link shares the data files of an ONNX decoder, but the weights of this model are written anew; "
            "leave --hard-link out.",
            "hard_link",
        )
    from topw_deploy.export.trace.decoder import traced_decoder

    packed = PackedCheckpoint.of(source.folder) if request.quantisation is not None else None
    if packed is not None and request.torch_dtype != "float32":
        raise ParameterError(
            f"compute_dtype is {request.compute_dtype!r}, but {source.id} holds {packed.kind.method.upper()} codes, "
            "which are kept for products in fp32 only; leave --compute-dtype out.",
            "compute_dtype",
        )
    decoder = traced_decoder(
        source,
        dtype=request.torch_dtype,
        opset=request.opset or DEFAULT_OPSET,
        num_hidden_layers=request.num_hidden_layers,
        trust_remote_code=request.trust_remote_code,
        progress=progress,
        notices=notices,
        kv=request.kv,
        target=request.target or TARGETS[0],
        max_length=request.max_length,
        quantised=request.quantisation is not None,
        stages=stages,
    )
    if request.quantisation is not None:
        progress(f"Replacing products and embedding by {request.quantisation.dtype}")
        rows = PackedRows(packed) if packed is not None else None
        cut = request.num_hidden_layers is not None
        notices += quantise(decoder.model, request.quantisation, rows, cut=cut)
        chosen = request.quantisation
        decoder.info = replace(decoder.info, weights_dtype=chosen.dtype, quantisation=chosen.as_dict())
    return decoder


def _table(decoder: Decoder) -> ir.Value | None:
    """The stored embedding table of a traced decoder, if it has one."""
    try:
        table = find_embedding(decoder.model.graph).data[0]
    except UnsupportedModelError:  # only the uniform metric gets here without a table
        return None
    return table if table.producer() is None else None

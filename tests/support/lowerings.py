"""Lowers copies of a trace and runs them."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import onnxruntime as ort

from topw_deploy.export.sampler.attach import last_logits
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.export.traced_decoder import Lowered, lower
from topw_deploy.export.verification.reference import CacheDriver, cache_driver
from topw_deploy.manifest import DecoderInfo

CONTEXT = 256
LOWERINGS = {
    "concat": {"kv": "concat", "target": "onnxruntime"},
    "group_query": {"kv": "static", "target": "onnxruntime"},
    "scatter": {"kv": "static", "target": "tensorrt", "max_length": 0},
}


def copy_of(traced: TracedDecoder) -> TracedDecoder:
    return replace(traced, model=traced.model.clone())


def lowered(traced: TracedDecoder, lowering: str) -> tuple[TracedDecoder, Lowered]:
    """A lowered copy of `traced`."""
    decoder = copy_of(traced)
    return decoder, lower(decoder, context_length=CONTEXT, **LOWERINGS[lowering])


def attention_nodes(decoder: TracedDecoder) -> list[ir.Node]:
    return [node for node in decoder.model.graph if node.op_type == "GroupQueryAttention"]


def driver_of(decoder: TracedDecoder, form: Lowered, kv_dtype: str = "float") -> CacheDriver:
    """Runs `decoder` for each row's last logits."""
    graph = decoder.model.graph
    last = last_logits(graph)
    last.name = "last"
    graph.outputs.append(last)
    info = DecoderInfo(
        model_type="tiny",
        kv_form=form.kv_form,
        num_layers=decoder.num_layers,
        states=form.states,
        kv_dtype=kv_dtype,
        context_length=CONTEXT,
        left_padding=True,
        ragged_chunks=form.ragged_chunks,
        most_columns=form.most_columns,
    )
    model = ir.to_proto(decoder.model).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # there is a worker for each core; idle threads of a session spin
    return cache_driver(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), info, "last")

"""Which lowering a decoder gets: the one for its target, or the plain one with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from topw_deploy.export.lowering import concat, group_query, scatter
from topw_deploy.export.lowering.narrow_rotary import narrow_rotary
from topw_deploy.export.lowering.norm_types import cast_rows_of_norms
from topw_deploy.export.lowering.packed_gate_up import pack_gates
from topw_deploy.export.lowering.partial_rotary import fuse_partial_rotary
from topw_deploy.export.lowering.rotary import fuse_rotary
from topw_deploy.export.trace.trace import TracedDecoder

_MULTIPLE = 64  # tokens: what max_length is a multiple of
_USUAL_LENGTH = 4096  # tokens of a cache whose length nobody chose: half a gigabyte or less in models of up to 3 B


@dataclass(frozen=True)
class Lowered:
    """How the runtime must drive the result (see manifest.DecoderInfo), and what the user should know.

    context_length: None where it is the model's own.
    """

    kv_form: str = "concat"
    attention: str = "Attention"
    ragged_chunks: bool = True
    buffer_step: int = 0
    buffer_least: int = 0
    context_length: int | None = None
    notice: str | None = None


def lower(
    decoder: TracedDecoder,
    *,
    kv: str | None,
    target: str,
    context_length: int,
    max_length: int | None = None,
    join_gates: bool = True,
) -> Lowered:
    """Replace every marker of `decoder` in place.

    kv: `static`, `concat`, or None for static where the decoder can. target: `onnxruntime` or `tensorrt`.
    context_length: most tokens of a sequence. max_length: slots of the cache, fixed in a graph for tensorrt, a multiple
    of 64; None for `usual_length`, 0 leaves them to the runtime, which only onnxruntime accepts. join_gates: see
    packed_gate_up.py; only static forms do.
    """
    # The trace computes equal angles once per use; one value each lets the lowerings see that they are equal.
    CommonSubexpressionEliminationPass()(decoder.model)
    fuse_rotary(decoder.model)
    narrow_rotary(decoder.model)
    fuse_partial_rotary(decoder.model)
    if kv == "concat":
        concat.lower(decoder, tensorrt=target == "tensorrt")
        lowered = Lowered()
    elif target == "tensorrt":
        lowered = _scattered(decoder, context_length, max_length, join_gates)
    else:
        lowered = _grouped(decoder, context_length, join_gates)
    cast_rows_of_norms(decoder.model)
    return lowered


def _grouped(decoder: TracedDecoder, context_length: int, join_gates: bool) -> Lowered:
    reason = group_query.refusal(decoder)
    if reason is not None:
        concat.lower(decoder)
        return Lowered(notice=f"the cache is copied in every step (--kv concat), because {reason}")
    group_query.lower(decoder, context_length)
    if join_gates:
        pack_gates(decoder.model)
    return Lowered("static", group_query.OPERATOR, ragged_chunks=False)


def usual_length(context_length: int) -> int:
    """Slots of a cache for tensorrt unless `max_length` says otherwise: the context, but at most 4,096 tokens."""
    return min(-(-context_length // _MULTIPLE) * _MULTIPLE, _USUAL_LENGTH)


def _scattered(decoder: TracedDecoder, context_length: int, max_length: int | None, join_gates: bool) -> Lowered:
    slots = usual_length(context_length) if max_length is None else max_length
    scatter.lower(decoder, slots or None)
    if join_gates:
        pack_gates(decoder.model)
    if not slots:
        notice = (
            "the cache's length is left to the runtime (--max-length 0), which only onnxruntime accepts: NVIDIA's "
            "parser needs a number"
        )
        return Lowered("static", scatter.OPERATOR, buffer_step=scatter.BUFFER_STEP, notice=notice)
    context = min(context_length, slots)
    notice = (
        f"a sequence may reach {context:,} tokens, prompt and answer together, of the model's {context_length:,}; "
        "--max-length sets another number"
    )
    return Lowered(
        "static",
        scatter.OPERATOR,
        buffer_step=slots,
        buffer_least=slots,
        context_length=context,
        notice=notice if max_length is None else None,
    )

"""Which lowering a decoder gets: the one for its target, or the plain one with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from topw_deploy.export.lowering import concat, group_query, scatter
from topw_deploy.export.trace import TracedDecoder


@dataclass(frozen=True)
class Lowered:
    """How the runtime must drive the result (see manifest.DecoderInfo), and what the user should know."""

    kv_form: str = "concat"
    attention: str = "Attention"
    ragged_chunks: bool = True
    buffer_step: int = 0
    notice: str | None = None


def lower(decoder: TracedDecoder, *, kv: str | None, target: str, context_length: int) -> Lowered:
    """Replace every marker of `decoder` in place.

    kv: `static`, `concat`, or None for static where the decoder can. target: `onnxruntime` or `tensorrt`.
    """
    # The trace computes equal angles once per use; one value each lets the lowerings see that they are equal.
    CommonSubexpressionEliminationPass()(decoder.model)
    if kv == "concat":
        concat.lower(decoder)
        return Lowered()
    if target == "tensorrt":
        scatter.lower(decoder)
        return Lowered("static", scatter.OPERATOR, buffer_step=scatter.BUFFER_STEP)
    reason = group_query.refusal(decoder)
    if reason is not None:
        concat.lower(decoder)
        return Lowered(notice=f"the cache is copied in every step (--kv concat), because {reason}")
    group_query.lower(decoder, context_length)
    return Lowered("static", group_query.OPERATOR, ragged_chunks=False)

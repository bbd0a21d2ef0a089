"""Choose and run the lowering for a target, and the rewrites around it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from topw_deploy.export.lowering import concat, group_query, scatter
from topw_deploy.export.lowering.experts import lower_experts
from topw_deploy.export.lowering.mixers import most_columns
from topw_deploy.export.lowering.rewrites import (
    cast_rows_of_norms,
    drop_softplus_thresholds,
    fuse_gate_up,
    merge_reshapes,
    spell_out_exclusive_or,
)
from topw_deploy.export.lowering.rotary import fuse_partial_rotary, fuse_rotary, narrow_rotary
from topw_deploy.export.trace.trace import TracedDecoder
from topw_deploy.manifest import State

_LENGTH_MULTIPLE = 64  # tokens; max_length is a multiple of it
_LONGEST_DEFAULT = 4096  # tokens; the cache of a model of at most 3 B parameters then takes at most 0.5 GB


@dataclass(frozen=True)
class Lowered:
    """How to run a lowered decoder. Other fields than these are those of manifest.DecoderInfo.

    context_length: longest sequence in tokens; None for the model's own context.
    notice: a sentence for the user about the choice, or None.
    """

    states: tuple[State, ...]
    kv_form: str = "concat"
    attention: str = "Attention"
    ragged_chunks: bool = True
    most_columns: int = 0
    buffer_step: int = 0
    buffer_least: int = 0
    context_length: int | None = None
    least_onnxruntime: str = ""
    notice: str | None = None


def lower(
    decoder: TracedDecoder,
    *,
    kv: str | None,
    target: str,
    context_length: int,
    max_length: int | None = None,
    fuse_gates: bool = True,
    quantised: bool = False,
    window_cache: bool = True,
) -> Lowered:
    """Replace every placeholder of `decoder` in place.

    kv: `concat` for a concatenated cache; `static` or None for a static cache, or a concatenated one where
        onnxruntime's operator cannot compute the attention.
    target: `onnxruntime` or `tensorrt`.
    context_length: longest sequence in tokens.
    max_length: number of slots of tensorrt's static cache, a multiple of 64. None: `default_length`. 0: chosen at run
        time, which only onnxruntime supports.
    fuse_gates: fuse gate and up products, if the cache is static.
    quantised: the weights will be quantised for onnxruntime's operators.
    window_cache: for onnxruntime's static cache: layers with a sliding window keep only its tokens.
    Raises UnsupportedModelError for a recurrence that the target's operators cannot compute.
    """
    lower_experts(decoder.model, operator=target != "tensorrt" and (quantised or kv != "concat"), quantised=quantised)
    if target == "tensorrt":
        spell_out_exclusive_or(decoder.model)
    # Merge equal nodes, because the lowerings compare rotary angles by identity.
    CommonSubexpressionEliminationPass()(decoder.model)
    fuse_rotary(decoder.model)
    narrow_rotary(decoder.model)
    fuse_partial_rotary(decoder.model)
    if target == "onnxruntime":  # its Softplus does not overflow
        drop_softplus_thresholds(decoder.model)
    columns = most_columns(decoder, contrib=target == "onnxruntime")
    if kv == "concat":
        lowered = Lowered(tuple(concat.lower(decoder, tensorrt=target == "tensorrt")))
    elif target == "tensorrt":
        lowered = _lower_for_tensorrt(decoder, context_length, max_length)
    else:
        lowered = _lower_for_onnxruntime(decoder, context_length, window_cache)
    if fuse_gates and lowered.kv_form == "static":
        fuse_gate_up(decoder.model)
    cast_rows_of_norms(decoder.model)
    merge_reshapes(decoder.model)
    states = sorted(lowered.states, key=lambda state: state.layer)
    return replace(lowered, states=tuple(states), most_columns=columns)


def default_length(context_length: int) -> int:
    """Number of slots of tensorrt's cache: the context rounded up to a multiple of 64, at most 4,096."""
    return min(-(-context_length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, _LONGEST_DEFAULT)


def _lower_for_onnxruntime(decoder: TracedDecoder, context_length: int, window_cache: bool) -> Lowered:
    reason = group_query.refusal(decoder)
    if reason is not None:
        states = tuple(concat.lower(decoder))
        return Lowered(states, notice=f"the cache is copied in every step (--kv concat), because {reason}")
    states = tuple(group_query.lower(decoder, context_length, window_cache=window_cache))
    least = group_query.WINDOW_CACHE_SINCE if any(state.window for state in states) else ""
    return Lowered(states, "static", group_query.OPERATOR, ragged_chunks=False, least_onnxruntime=least)


def _lower_for_tensorrt(decoder: TracedDecoder, context_length: int, max_length: int | None) -> Lowered:
    slots = default_length(context_length) if max_length is None else max_length
    states = tuple(scatter.lower(decoder, slots or None))
    if not slots:
        notice = (
            "the cache's length is chosen at run time (--max-length 0), so only onnxruntime can run this file: "
            "NVIDIA's parser needs a fixed length"
        )
        return Lowered(states, "static", scatter.OPERATOR, buffer_step=scatter.BUFFER_STEP, notice=notice)
    context = min(context_length, slots)
    notice = (
        f"a sequence may reach {context:,} tokens, prompt and answer together; the model's own limit is "
        f"{context_length:,}, and --max-length changes the limit of the export"
    )
    return Lowered(
        states,
        "static",
        scatter.OPERATOR,
        buffer_step=slots,
        buffer_least=slots,
        context_length=context,
        notice=notice if max_length is None else None,
    )

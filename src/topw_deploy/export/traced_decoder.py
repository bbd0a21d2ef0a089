"""Build the decoder of a Hugging Face checkpoint: load, check, trace and lower it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from topw_deploy.dtypes import onnx_name
from topw_deploy.export.graph import Decoder
from topw_deploy.export.lowering import concat, group_query, scatter
from topw_deploy.export.lowering.experts import lower_experts
from topw_deploy.export.lowering.mixers import most_columns
from topw_deploy.export.lowering.rewrites import (
    cast_rows_of_norms,
    fuse_gate_up,
    merge_reshapes,
    spell_out_exclusive_or,
)
from topw_deploy.export.lowering.rotary import fuse_partial_rotary, fuse_rotary, narrow_rotary
from topw_deploy.export.options import DEFAULT_OPSET, ExportOptions
from topw_deploy.export.source.checkpoint import load_unread, overflow_notice
from topw_deploy.export.source.quantised import QuantisedFormat
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.source.text_decoder import context_length, switching_rope
from topw_deploy.export.trace.attention import dense_tokens
from topw_deploy.export.trace.trace import TracedDecoder, trace
from topw_deploy.manifest import TARGETS, DecoderInfo, State
from topw_deploy.progress import Progress

_IR_VERSION = 11  # the first that has opset 23


def build_decoder(
    source: Source, stored: QuantisedFormat | None, options: ExportOptions, progress: Progress
) -> Decoder:
    """Load, check, trace and lower the checkpoint `source`, whose weights are `stored`. They stay in their files.

    Raises SourceError for a checkpoint that cannot be read, and UnsupportedModelError for one that cannot be exported.
    """
    dtype, target, opset = options.torch_dtype, options.target or TARGETS[0], options.opset or DEFAULT_OPSET
    progress.say(f"Loading {source.id} in {dtype}")
    model, notices, source_tensors = load_unread(
        source.folder, dtype, num_hidden_layers=options.num_hidden_layers, trust_remote_code=options.trust_remote_code
    )
    if dtype == "float16" and not options.dry_run:  # a dry run reads no weights
        progress.say("Checking activations for float16 overflow")
        notices.append(overflow_notice(model, source.folder))
    progress.say("Tracing")
    traced = trace(model)
    most, dense = context_length(model.config), dense_tokens(model)
    context = most if dense is None else min(most, dense)
    notices += _limit_notices(model.config, dtype, most, dense)
    # Fusing gates saves time with quantised weights only. It joins two weights, whose codes in a checkpoint may
    # be packed differently.
    joins = stored is None or not stored.integers or (stored.gguf is not None and stored.gguf.has_gates_of_one_type)
    fuse_gates = options.quantisation is not None and joins
    lowered = lower(
        traced,
        kv=options.kv,
        target=target,
        context_length=context,
        max_length=options.max_length,
        window_cache=options.window_cache is not False,
        fuse_gates=fuse_gates,
        quantised=options.quantisation is not None,
    )
    progress.say(f"  attention: {lowered.attention}; cache: {lowered.kv_form}")
    if lowered.notice is not None:
        notices.append(lowered.notice)
    # The trace has opset 23; its operators are also valid in 24.
    traced.model.opset_imports[""] = max(opset, traced.model.opset_imports[""])
    traced.model.ir_version = max(traced.model.ir_version, _IR_VERSION)
    settings = {name: value for name, value in vars(lowered).items() if name != "notice"}
    info = DecoderInfo(
        **{**settings, "context_length": lowered.context_length or context},
        model_type=model.config.model_type,
        num_layers=traced.num_layers,
        kv_dtype=onnx_name(dtype),
        left_padding=True,
        weights_dtype=onnx_name(dtype),
        target=target,  # type: ignore[arg-type]  # a name, checked in the request
    )
    return Decoder(traced.model, info, foreign=False, notices=notices, source_tensors=source_tensors, module=model)


def _limit_notices(config: Any, dtype: str, most: int, dense: int | None) -> list[str]:
    """What the export of a model cannot do, or was not compared in, as sentences for the user.

    most: the context length. dense: see `dense_tokens`.
    """
    notices = []
    if dtype == "bfloat16":
        notices.append(
            "bfloat16 graphs cannot run on a CPU, so the decoder was not run to verify it; use --dtype fp32 for CPUs"
        )
    if switching_rope(config) == most:
        notices.append(
            f"this model changes its rotary frequencies beyond {most} tokens, which a graph cannot do, so the export's "
            "context ends there"
        )
    if dense is not None and dense < most:
        notices.append(
            f"in longer sequences this model attends to {dense:,} selected tokens; the export attends to all tokens, "
            "so its context ends there"
        )
    if getattr(config, "vision_config", None) is not None:
        notices.append("this model also reads images; the export reads text alone")
    return notices


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

"""Build the decoder of a Hugging Face checkpoint: load, check, trace and lower it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from topw_deploy.dtypes import onnx_name
from topw_deploy.errors import UnsupportedModelError, one_line
from topw_deploy.export.graph import Decoder
from topw_deploy.export.lowering import lower
from topw_deploy.export.options import DEFAULT_OPSET, ExportOptions
from topw_deploy.export.source.checkpoint import context_length, load_unread, overflowing_modules, switching_rope
from topw_deploy.export.source.quantised import quantised_format
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.source.unread_tensor import load_during_calls
from topw_deploy.export.trace.attention import dense_tokens
from topw_deploy.export.trace.trace import trace
from topw_deploy.manifest import TARGETS, DecoderInfo
from topw_deploy.progress import Progress

_IR_VERSION = 11  # the first that has opset 23
_SAMPLE_TEXT = """The quick brown fox jumps over the lazy dog. In 1815 the treaty was signed; 3.14159 is near pi.
def add(a, b):
    return a + b
Wir fahren morgen nach München. Où est la bibliothèque? 東京は日本の首都です。
"""


def build_decoder(source: Source, options: ExportOptions, progress: Progress) -> Decoder:
    """Load, check, trace and lower the checkpoint `source`. The weights stay in their files.

    Raises SourceError for a checkpoint that cannot be read, and UnsupportedModelError for one that cannot be exported.
    """
    dtype, target, opset = options.torch_dtype, options.target or TARGETS[0], options.opset or DEFAULT_OPSET
    progress.say(f"Loading {source.id} in {dtype}")
    model, notices = load_unread(
        source.folder,
        dtype,
        num_hidden_layers=options.num_hidden_layers,
        trust_remote_code=options.trust_remote_code,
    )
    if dtype == "float16" and not options.dry_run:  # a dry run reads no weights
        progress.say("Checking activations for float16 overflow")
        notices.append(_overflow_notice(model, source.folder))
    notices += _limit_notices(model, dtype)
    progress.say("Tracing")
    traced = trace(model)
    context = min(context_length(model.config), dense_tokens(model) or context_length(model.config))
    # Fusing gates saves time with quantised weights only. It joins two weights, so it needs weights that the export
    # quantises: codes of a quantised checkpoint, which are kept, may be packed differently.
    stored = quantised_format(source.folder)
    fuse_gates = options.quantisation is not None and (stored is None or not stored.integers)
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
    progress.say(f"Lowered attention to {lowered.attention}, the cache {lowered.kv_form}")
    if lowered.notice is not None:
        notices.append(lowered.notice)
    # The trace has opset 23; its operators are also valid in 24.
    traced.model.opset_imports[""] = max(opset, traced.model.opset_imports[""])
    traced.model.ir_version = max(traced.model.ir_version, _IR_VERSION)
    info = DecoderInfo(
        model_type=model.config.model_type,
        kv_form=lowered.kv_form,
        num_layers=traced.num_layers,
        states=lowered.states,
        kv_dtype=onnx_name(dtype),
        context_length=lowered.context_length or context,
        left_padding=True,
        weights_dtype=onnx_name(dtype),
        attention=lowered.attention,
        ragged_chunks=lowered.ragged_chunks,
        most_columns=lowered.most_columns,
        buffer_step=lowered.buffer_step,
        buffer_least=lowered.buffer_least,
        target=target,  # type: ignore[arg-type]  # a name, checked in the request
        least_onnxruntime=lowered.least_onnxruntime,
    )
    return Decoder(traced.model, info, foreign=False, notices=notices)


def _limit_notices(model: PreTrainedModel, dtype: str) -> list[str]:
    """What the export of `model` cannot do, or was not compared in, as sentences for the user."""
    notices = []
    if dtype == "bfloat16":
        notices.append(
            "bfloat16 graphs cannot run on a CPU, so the decoder was not run to verify it; use --dtype fp32 for CPUs"
        )
    if switching_rope(model.config) is not None:
        notices.append(
            f"this model changes its rotary frequencies beyond {context_length(model.config)} tokens, which a graph "
            "cannot do, so the export's context ends there"
        )
    if (tokens := dense_tokens(model)) is not None and tokens < context_length(model.config):
        notices.append(
            f"in longer sequences this model attends to {tokens:,} selected tokens; the export attends to all tokens, "
            "so its context ends there"
        )
    if getattr(model.config, "vision_config", None) is not None:
        notices.append("this model also reads images; the export reads text alone")
    return notices


def _overflow_notice(model: PreTrainedModel, folder: Path) -> str:
    """Run `model` on samples. Returns what overflowed, as a sentence for the user."""
    try:
        with load_during_calls(model):
            names = overflowing_modules(model, sample_batches(model, folder))
    except RuntimeError as error:  # such as for float32 weights that the model keeps for precision
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run in float16 in transformers ({one_line(error)}); use --dtype fp32 or "
            "bf16."
        ) from error
    if not names:
        return "no activation exceeded float16's range on the sample text"
    return (
        f"activations exceed float16's range on the sample text in {len(names)} modules (first: {names[0]}): "
        "the export may return NaN; use --dtype fp32 or bf16"
    )


def sample_batches(model: PreTrainedModel, folder: Path) -> list[torch.Tensor]:
    """Token ids [1, n]: one batch spread over the vocabulary, and one of sample text if there is a tokenizer."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    length = min(64, context_length(model.config))
    batches = [torch.linspace(0, vocab - 1, length).long()[None]]
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_SAMPLE_TEXT).ids
        ids = [i for i in ids if i < vocab][:length]
        if ids:
            batches.append(torch.tensor(ids)[None])
    return batches

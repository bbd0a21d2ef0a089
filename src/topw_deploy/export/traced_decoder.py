"""Load, trace and lower a Hugging Face checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from topw_deploy.dtypes import onnx_name
from topw_deploy.errors import UnsupportedModelError, one_line
from topw_deploy.export.decoder import Decoder
from topw_deploy.export.job import Job
from topw_deploy.export.lowering import lower
from topw_deploy.export.request import DEFAULT_OPSET
from topw_deploy.export.source.checkpoint import context_length, load_unread, overflowing_modules, switching_rope
from topw_deploy.export.source.quantised import quantised_format
from topw_deploy.export.source.unread_tensor import load_during_calls
from topw_deploy.export.trace.interface import dense_tokens
from topw_deploy.export.trace.trace import TracedDecoder, load_trace, save_trace, trace
from topw_deploy.manifest import TARGETS, DecoderInfo

_IR_VERSION = 11  # the first with opset 23
_SAMPLE_TEXT = """The quick brown fox jumps over the lazy dog. In 1815 the treaty was signed; 3.14159 is near pi.
def add(a, b):
    return a + b
Wir fahren morgen nach München. Où est la bibliothèque? 東京は日本の首都です。
"""


def traced_decoder(job: Job) -> Decoder:
    """Load, check, trace and lower the job's checkpoint."""
    source, wanted, weights = job.source, job.request.graph, job.request.weights
    dtype, target, opset = weights.torch_dtype, wanted.target or TARGETS[0], wanted.opset or DEFAULT_OPSET
    job.progress.say(f"Loading {source.id} in {dtype}")
    model, notices = load_unread(
        source.folder,
        dtype,
        num_hidden_layers=wanted.num_hidden_layers,
        trust_remote_code=job.request.hub.trust_remote_code,
    )
    if dtype == "float16" and not job.request.dry_run:  # a dry run reads no weights
        job.progress.say("Checking activations for float16 overflow")
        notices.append(_overflow_notice(model, job))
    notices += _limits_of(model, dtype)
    traced = _traced(model, job)
    context = min(context_length(model.config), dense_tokens(model) or context_length(model.config))
    # Fusing saves time with quantised weights only, and weights whose codes are kept may be packed differently.
    stored = quantised_format(source.folder)
    fuse_gates = weights.quantisation is not None and (stored is None or not stored.integers)
    lowered = lower(
        traced,
        kv=wanted.kv,
        target=target,
        context_length=context,
        max_length=wanted.max_length,
        window_cache=wanted.window_cache is not False,
        fuse_gates=fuse_gates,
        quantised=weights.quantisation is not None,
    )
    job.progress.say(f"Lowered attention to {lowered.attention}, the cache {lowered.kv_form}")
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
        target=target,
        least_onnxruntime=lowered.least_onnxruntime,
    )
    return Decoder(traced.model, info, foreign=False, notices=tuple(notices))


def _limits_of(model: PreTrainedModel, dtype: str) -> list[str]:
    found = []
    if dtype == "bfloat16":
        found.append(
            "bfloat16 graphs cannot run on a CPU, so the decoder was not run to verify it; use --dtype fp32 for CPUs"
        )
    if switching_rope(model.config) is not None:
        found.append(
            f"this model changes its rotary frequencies beyond {context_length(model.config)} tokens, which a graph "
            "cannot do, so the export's context ends there"
        )
    if (tokens := dense_tokens(model)) is not None and tokens < context_length(model.config):
        found.append(
            f"in longer sequences this model attends to {tokens:,} selected tokens; the export attends to all tokens, "
            "so its context ends there"
        )
    if getattr(model.config, "vision_config", None) is not None:
        found.append("this model also reads images; the export reads text alone")
    return found


def _traced(model: PreTrainedModel, job: Job) -> TracedDecoder:
    stage, journal, stamp = "traced graph", job.finished.journal, job.finished.trace
    found = journal.find(stage, stamp, file=str, num_layers=int)
    if found is not None:
        return load_trace(found["file"], found["num_layers"], model)
    job.progress.say("Tracing")
    traced = trace(model)
    save = partial(save_trace, traced, model)
    journal.record_file(stage, stamp, "trace.onnx", save, num_layers=traced.num_layers)
    return traced


def _overflow_notice(model: PreTrainedModel, job: Job) -> str:
    stage, journal, stamp = "overflow check", job.finished.journal, job.finished.trace
    noted = journal.find(stage, stamp, found=list)
    if noted is None:
        try:
            with load_during_calls(model):
                found = overflowing_modules(model, sample_batches(model, job.source.folder))
        except RuntimeError as error:  # such as of float32 weights that the model keeps for precision
            raise UnsupportedModelError(
                f"{type(model).__name__} does not run in float16 in transformers ({one_line(error)}); use --dtype "
                "fp32 or bf16."
            ) from error
        journal.record(stage, stamp, found=found)
    else:
        found = noted["found"]
    if not found:
        return "no activation exceeded float16's range on the sample text"
    return (
        f"activations exceed float16's range on the sample text in {len(found)} modules (first: {found[0]}): "
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

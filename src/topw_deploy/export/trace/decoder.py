"""From a Hugging Face checkpoint to a traced and lowered decoder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.lowering import lower
from topw_deploy.export.progress import Progress
from topw_deploy.export.resume.stages import Stages
from topw_deploy.export.source.checkpoint import context_length, load_unread, overflowing_modules, switching_rope
from topw_deploy.export.source.packed.formats import packed_format
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.source.streamed import streamed
from topw_deploy.export.trace.trace import TracedDecoder, load_trace, save_trace, trace
from topw_deploy.export.trace.workarounds import has_experts
from topw_deploy.manifest import DecoderInfo

_IR_VERSION = 11  # the first with opset 23
_ONNX_NAMES = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}
_SAMPLE_TEXT = """The quick brown fox jumps over the lazy dog. In 1815 the treaty was signed; 3.14159 is near pi.
def add(a, b):
    return a + b
Wir fahren morgen nach München. Où est la bibliothèque? 東京は日本の首都です。
"""


def traced_decoder(
    source: Source,
    *,
    dtype: str,
    opset: int,
    num_hidden_layers: int | None,
    trust_remote_code: bool,
    progress: Progress,
    notices: list[str],
    kv: str | None = None,
    target: str = "onnxruntime",
    max_length: int | None = None,
    quantised: bool = False,
    stages: Stages | None = None,
) -> Decoder:
    """Load, check, trace and lower the checkpoint of `source`. Adds notices for the user to `notices`.

    quantised: whether the weights will be quantised. Fused gate and up products are faster only then.
    stages: keeps the trace of this export and finds that of an interrupted one; None for a dry run.
    """
    progress(f"Loading {source.id} in {dtype}")
    model, read_whole = load_unread(
        source.folder, dtype, num_hidden_layers=num_hidden_layers, trust_remote_code=trust_remote_code
    )
    if read_whole is not None:
        notices.append(
            f"the export held all weights in memory, because they could not be left in their files: {read_whole}"
        )
    if dtype == "float16" and stages is not None:  # a dry run reads no weights
        progress("Checking activations for float16 overflow")
        notices.append(_overflow_notice(model, source.folder, stages))
    notices += _limits_of(model, dtype)
    traced = _traced(model, opset, progress, stages)
    context = context_length(model.config)
    # A checkpoint's own codes are kept only for whole products packed alike, which two fused ones may not be.
    fuse_gates = quantised and packed_format(source.folder) is None
    lowered = lower(traced, kv=kv, target=target, context_length=context, max_length=max_length, fuse_gates=fuse_gates)
    progress(f"Lowered attention to {lowered.attention}, the cache {lowered.kv_form}")
    if lowered.notice is not None:
        notices.append(lowered.notice)
    # Traced at 23, whose operators are all valid at 24.
    traced.model.opset_imports[""] = max(opset, traced.model.opset_imports[""])
    traced.model.ir_version = max(traced.model.ir_version, _IR_VERSION)
    info = DecoderInfo(
        model_type=model.config.model_type,
        kv_form=lowered.kv_form,
        num_layers=len(traced.head_dim),
        num_kv_heads=traced.num_kv_heads,
        head_dim=traced.head_dim,
        kv_dtype=_ONNX_NAMES[dtype],
        context_length=lowered.context_length or context,
        left_padding=True,
        weights_dtype=_ONNX_NAMES[dtype],
        attention=lowered.attention,
        ragged_chunks=lowered.ragged_chunks,
        buffer_step=lowered.buffer_step,
        buffer_least=lowered.buffer_least,
        target=target,
    )
    return Decoder(traced.model, info, foreign=False)


def _limits_of(model: PreTrainedModel, dtype: str) -> list[str]:
    """Notices of what the graph cannot do, or only at a cost."""
    found = []
    if dtype == "bfloat16":
        found.append(
            "bfloat16 graphs cannot run on a CPU: use --dtype fp32 there; its decoder was not run to verify it"
        )
    if switching_rope(model.config) is not None:
        found.append(
            f"this model changes its rotary frequencies beyond {context_length(model.config)} tokens, which a graph "
            "cannot; the export's context ends there"
        )
    if has_experts(model):
        found.append(
            "this mixture of experts copies each token's experts to multiply with them, so a prompt takes memory in "
            "proportion to its length times the experts' size: expect that only short prompts fit"
        )
    return found


def _traced(model: PreTrainedModel, opset: int, progress: Progress, stages: Stages | None) -> TracedDecoder:
    found = None if stages is None else load_trace(model, stages.journal, stages.trace)
    if found is not None:
        return found
    progress("Tracing")
    traced = trace(model)
    if stages is not None:
        save_trace(traced, model, stages.journal, stages.trace)
    return traced


def _overflow_notice(model: PreTrainedModel, folder: Path, stages: Stages | None) -> str:
    stage = "overflow check"
    noted = None if stages is None else stages.journal.find(stage, stages.trace)
    if noted is None:
        with streamed(model):
            found = overflowing_modules(model, sample_batches(model, folder))
        if stages is not None:
            stages.journal.done(stage, stages.trace, found=found)
    else:
        found = noted["found"]
    if not found:
        return "no activation left float16's range on the sample text"
    return (
        f"activations leave float16's range on the sample text in {len(found)} modules (first: {found[0]}): "
        "the export may answer with NaN; use --dtype fp32 or bf16"
    )


def sample_batches(model: PreTrainedModel, folder: Path) -> list[torch.Tensor]:
    """Token ids [1, n]: ids spread over the vocabulary, and the sample text if there is a tokenizer.json."""
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

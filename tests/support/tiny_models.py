"""Tiny random models of every family, from configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.traces import trace
from topw_deploy.export import ExportReport, export_model
from topw_deploy.export.lowering.concat import lower

VOCAB = 320
WINDOW = 8
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ONE_LAYER = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}

# GroupQueryAttention cannot rotate heads of size 8.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama_tied": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama_untied": lambda: LlamaConfig(**COMMON, head_dim=16, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**COMMON, head_dim=16),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "phi3": lambda: Phi3Config(**COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=16, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **COMMON, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
}


def make_model(family: str | PreTrainedConfig) -> PreTrainedModel:
    """Random float32, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    config = FAMILIES[family]() if isinstance(family, str) else family
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.1)
            elif parameter.dim() > 1:
                parameter.mul_(6)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # DeepSeek V4's experts of each token
                table.random_(config.n_routed_experts)
    return model


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE with the configurations' special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def parse(text): return text", "a list of the words in the string"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def write_checkpoint(folder: Path, family: str | PreTrainedConfig) -> Path:
    """A Hugging Face folder: configuration, weights, tokenizer."""
    make_model(family).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_decoder(folder: Path, family: str, change: Callable[[ir.Model], None] = lambda _model: None) -> Path:
    """A decoder like another exporter's: logits of all positions, separate weights.

    change: edits the graph first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(family)
    traced = trace(model)
    lower(traced)
    change(traced.model)
    ir.save(traced.model, folder / "model.onnx", external_data="model.onnx.data")
    model.config.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def export(model: Path | str, output: Path, **settings: object) -> ExportReport:
    """Unverified by default. settings: of export_model."""
    settings = {"verify": False, **settings}
    return export_model(model, output, **settings)  # type: ignore[arg-type]

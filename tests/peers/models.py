"""Tiny random checkpoints for other exporters, and folders made from them.

Their sizes suit 4-bit blocks, grouped heads and fused attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig

VOCAB, LAYERS, HEADS, DIM, CONTEXT, WINDOW = 320, 2, 2, 16, 256, 16
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,  # onnxruntime-genai's builder needs one
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-tied": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_COMMON,
        head_dim=DIM,
        sliding_window=WINDOW,
        query_pre_attn_scalar=DIM,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON,
        head_dim=DIM,
        sliding_window=WINDOW,
        query_pre_attn_scalar=DIM,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=2, n_positions=CONTEXT, bos_token_id=1, eos_token_id=2
    ),
}


@dataclass(frozen=True)
class Peer:
    """One folder: its maker (`optimum`, `mobius`, `genai`), checkpoint, and command-line words."""

    maker: str
    checkpoint: str
    options: tuple[str, ...] = ()


PEERS: dict[str, Peer] = {
    "optimum-llama-tied": Peer("optimum", "llama-tied"),
    "optimum-llama-untied": Peer("optimum", "llama-untied"),
    "optimum-mistral": Peer("optimum", "mistral"),
    "optimum-gemma2": Peer("optimum", "gemma2"),
    "optimum-gpt2": Peer("optimum", "gpt2"),
    "mobius-llama-tied": Peer("mobius", "llama-tied"),
    "mobius-llama-untied": Peer("mobius", "llama-untied"),
    "mobius-mistral": Peer("mobius", "mistral"),
    "mobius-gemma3": Peer("mobius", "gemma3"),
    "mobius-cpu-llama-tied": Peer("mobius", "llama-tied", ("--ep", "cpu", "--runtime", "ort-genai")),
    "mobius-cpu-mistral": Peer("mobius", "mistral", ("--ep", "cpu", "--runtime", "ort-genai")),
    "mobius-static-llama-tied": Peer("mobius", "llama-tied", ("--static-cache",)),
    "genai-llama-tied": Peer("genai", "llama-tied", ("-p", "fp32", "-e", "cpu")),
    "genai-llama-untied": Peer("genai", "llama-untied", ("-p", "fp32", "-e", "cpu")),
    "genai-int4-llama-tied": Peer("genai", "llama-tied", ("-p", "int4", "-e", "cpu")),
    "genai-int4-llama-untied": Peer("genai", "llama-untied", ("-p", "int4", "-e", "cpu")),
    "genai-fp16-llama-tied": Peer("genai", "llama-tied", ("-p", "fp16", "-e", "cuda")),
    "genai-mistral": Peer("genai", "mistral", ("-p", "fp32", "-e", "cpu")),
    "genai-gemma2": Peer("genai", "gemma2", ("-p", "fp32", "-e", "cpu")),
}

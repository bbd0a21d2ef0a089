"""Tiny random models with convolution or recurrent layers, from configurations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.tiny_models import VOCAB, WINDOW

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2}
_COMMON = {**_SMALL, "max_position_embeddings": 256}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE = {**_COMMON, **_ATTENTION, "intermediate_size": 48}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_CONVOLUTION_FIRST = {"layer_types": ["conv", "full_attention"]}
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_QWEN = {**_DELTA, **_LINEAR_FIRST, "head_dim": 16}
_QWEN_EXPERTS = {**_QWEN, **_EXPERTS, "shared_expert_intermediate_size": 16}
_ZAMBA = {
    **_DENSE, "num_key_value_heads": 4, "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
}  # fmt: skip
_LATENT = {
    **_DENSE, **_LINEAR_FIRST, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_INKLING = {
    **_COMMON, **_ATTENTION, "unpadded_vocab_size": VOCAB, "head_dim": 8, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": WINDOW, "d_rel": 4,
    "rel_extent": 12,  # fewer tokens than a sequence has, as the floor
    "log_scaling_n_floor": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip


def _of(model_type: str, *shared: dict[str, Any], **own: Any) -> tuple[str, dict[str, Any]]:
    return model_type, {name: value for settings in (*shared, own) for name, value in settings.items()}


# Name in the tests -> (model type, settings).
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": _of("lfm2", _DENSE, _CONVOLUTION_FIRST, head_dim=8),
    "lfm2_moe": _of("lfm2_moe", _DENSE, _EXPERTS, _CONVOLUTION_FIRST, num_dense_layers=1),
    "lfm3": _of("lfm3", _DENSE, head_dim=8, sliding_window=WINDOW),
    "qwen3_next": _of("qwen3_next", _DENSE, _QWEN_EXPERTS),
    "qwen3_5_text": _of("qwen3_5_text", _DENSE, _QWEN),
    "qwen3_5_moe_text": _of("qwen3_5_moe_text", _COMMON, _ATTENTION, _QWEN_EXPERTS),
    "qwen4_exp_text": _of(
        "qwen4_exp_text", _COMMON, _ATTENTION, _QWEN_EXPERTS, layer_types=["linear_attention", "indexed_attention"],
        hc_count=2, hc_lowrank=8, ple_layer_ids=[1], ngram_vocab_size_base=256, heads_per_ngram=2, indexer_n_heads=2,
        indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=128, indexer_compress_ratio=4,
    ),
    "olmo_hybrid": _of("olmo_hybrid", _DENSE, _DELTA, _LINEAR_FIRST),
    "granitemoehybrid": _of(
        "granitemoehybrid", _DENSE, _MAMBA_2, _LINEAR_FIRST, num_local_experts=2, shared_intermediate_size=16
    ),
    "bamba": _of("bamba", _DENSE, _MAMBA_2, attn_layer_indices=[1]),
    "falcon_h1": _of("falcon_h1", _DENSE, _MAMBA_2, mamba_d_ssm=64, head_dim=8),
    "falcon_h1_norm": _of("falcon_h1", _DENSE, _MAMBA_2, mamba_d_ssm=64, head_dim=8, mamba_rms_norm=True),
    "nemotron_h": _of(
        "nemotron_h", _DENSE, head_dim=8, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=4, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    ),
    "jamba": _of(
        "jamba", _DENSE, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4
    ),
    "mamba": _of("mamba", _SMALL, state_size=4, time_step_rank=4),
    "falcon_mamba": _of("falcon_mamba", _SMALL, state_size=4, time_step_rank=4),
    "mamba2": _of("mamba2", _SMALL, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=4),
    "zamba": _of("zamba", _ZAMBA, mamba_d_state=4, mamba_dt_rank=4),
    "zamba2": _of("zamba2", _ZAMBA, mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=2, chunk_size=4),
    "kimi_linear": _of("kimi_linear", _LATENT, linear_head_dim=8, linear_num_heads=4),
    "bailing_hybrid": _of("bailing_hybrid", _LATENT, head_dim=8),
    "recurrent_gemma": _of(
        "recurrent_gemma", _COMMON, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
        attention_window_size=WINDOW, block_types=["recurrent", "attention"],
    ),
    "minimax": _of("minimax", _DENSE, _LINEAR_FIRST, head_dim=8, num_local_experts=4, block_size=4),
    "rwkv": _of("rwkv", _SMALL, context_length=256),
    "xlstm": _of("xlstm", _SMALL, num_heads=2, chunk_size=4, autocast_kernel_dtype="float32"),
    "inkling": _of(
        "inkling_text", _INKLING, intermediate_size=48, mlp_layer_types=["dense", "sparse"],
        logits_mup_width_multiplier=2.0,
    ),
    "inkling2": _of("inkling2_text", _INKLING, n_layers_per_attn_res_block=1),
    "zaya": _of("zaya", _COMMON, _ATTENTION, _EXPERTS, num_experts_per_tok=1, head_dim=8, router_hidden_size=16),
}  # fmt: skip


def hybrid_config(family: str) -> PreTrainedConfig:
    model_type, settings = HYBRIDS[family]
    return AutoConfig.for_model(model_type, **settings)


def make_hybrid(family: str) -> PreTrainedModel:
    """Random float32 weights. Gates are moderate and no vector is zero, so that every term of a recurrence matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hybrid_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) * _size_of(parameter))
            elif parameter.dim() == 1 and not name.endswith(("A_log", "recurrent_param")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _size_of(parameter: torch.Tensor) -> float:
    return 1.5 * parameter[0].numel() ** -0.5

"""Tiny models of every kind of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

WINDOW = CHUNK = 8
LENGTHS = (7, 40, 1, 23)  # five windows or chunks at most
_SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_OLD_SIZES: dict[str, Any] = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LONG: dict[str, Any] = {"max_position_embeddings": 256}
_GROUPED: dict[str, Any] = {**_SIZES, **_LONG, "num_key_value_heads": 2, "intermediate_size": 32}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_SIZES, **_LONG, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 32,
}  # fmt: skip
_LATENT_EXPERTS = {**_LATENT, **_EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LAYER_INPUTS: dict[str, Any] = {
    **_GROUPED, "num_hidden_layers": 4, "vocab_size_per_layer_input": 50, "head_dim": 16, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
_GIT_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
}  # fmt: skip

SINKS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "gpt_oss": lambda: tf.GptOssConfig(
        **{**_GROUPED, "intermediate_size": 16},
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
    ),
}  # fmt: skip
ALIBI: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "bloom": lambda: tf.BloomConfig(vocab_size=50, hidden_size=48, n_layer=2, n_head=6),  # slopes between powers
    "mpt": lambda: tf.MptConfig(vocab_size=50, d_model=48, n_layers=2, n_heads=6, max_seq_len=256),
    "falcon_alibi": lambda: tf.FalconConfig(**_SIZES, alibi=True),
}
OWN: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "doge": lambda: tf.DogeConfig(**_GROUPED, keep_window_size=128, is_moe=False),
    "git": lambda: tf.GitConfig(**_SIZES, **_LONG, intermediate_size=32, vision_config=_GIT_VISION),
    "gptj": lambda: tf.GPTJConfig(**_OLD_SIZES, rotary_dim=4, n_inner=32),
    "codegen": lambda: tf.CodeGenConfig(**_OLD_SIZES, rotary_dim=4, n_inner=32),
    "falcon": lambda: tf.FalconConfig(**_SIZES),
    "falcon_grouped": lambda: tf.FalconConfig(**_SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_sequential": lambda: tf.FalconConfig(**_SIZES, multi_query=False, parallel_attn=False, bias=True),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=WINDOW, intermediate_size=32, **_LONG,
    ),
    "gpt_neox_japanese": lambda: tf.GPTNeoXJapaneseConfig(**_SIZES, **_LONG, intermediate_multiple_size=2),
    "openai_gpt": lambda: tf.OpenAIGPTConfig(**_OLD_SIZES),
    "xglm": lambda: tf.XGLMConfig(vocab_size=50, d_model=32, ffn_dim=32, num_layers=2, attention_heads=4, **_LONG),
}  # fmt: skip
CHUNKS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama4": lambda: tf.Llama4TextConfig(
        **_GROUPED, head_dim=16, intermediate_size_mlp=32, num_local_experts=2, attention_chunk_size=CHUNK,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], floor_scale=4,
        attn_temperature_tuning=True, moe_layers=[1],
    ),
}  # fmt: skip
WIDTHS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama_12": lambda: tf.LlamaConfig(
        **{**_GROUPED, "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
    ),
    "mimo_v2_flash": lambda: tf.MiMoV2FlashConfig(
        **_GROUPED, **_EXPERTS, head_dim=24, v_head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2,
        swa_head_dim=24, swa_v_head_dim=16, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
    ),
    # Compressed vectors of 264 numbers are longer than keys and values of 160.
    "deepseek_v3_expanded": lambda: tf.DeepseekV3Config(**{**_LATENT_EXPERTS, "kv_lora_rank": 256}),
}  # fmt: skip
SHARED: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **_LAYER_INPUTS, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(**_LAYER_INPUTS, num_global_key_value_heads=2, global_head_dim=32),
}
LATENT: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "deepseek_v2": lambda: tf.DeepseekV2Config(**_LATENT_EXPERTS),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**_LATENT_EXPERTS),
    "minicpm3": lambda: tf.MiniCPM3Config(**_LATENT, scale_emb=1, dim_model_base=32),
    "deepseek_v32": lambda: tf.DeepseekV32Config(**_LATENT_EXPERTS, index_topk=64, index_n_heads=2, index_head_dim=16),
    "deepseek_v4": lambda: tf.DeepseekV4Config(
        **{**_SIZES, "num_hidden_layers": 3}, **_LONG, **_EXPERTS, head_dim=16, q_lora_rank=16, o_groups=2,
        o_lora_rank=8, hc_mult=2, sliding_window=WINDOW, partial_rotary_factor=0.5,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        index_topk=64, index_n_heads=2, index_head_dim=16,
    ),
}  # fmt: skip
TWICE: dict[str, Callable[[], tf.PreTrainedConfig]] = {"diffllama": lambda: tf.DiffLlamaConfig(**_GROUPED)}
KINDS = {**TWICE, **SINKS, **ALIBI, **OWN, **CHUNKS, **WIDTHS, **SHARED, **LATENT}

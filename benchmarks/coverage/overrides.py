"""Where an architecture's tiny configuration departs from the general rule.

Most entries add layers of each kind where the default has one kind only, or set sizes that depend on each other.
"""

from __future__ import annotations

from typing import Any

_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_CONV_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
_MAMBA_AND_FULL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_SHARED_CACHES = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 48,
    "indexer_compress_ratio": 4,
}
_NGRAMS = {"ple_layer_ids": [1], "ngram_vocab_size_base": 512, "split_ngram_parts": 4, "heads_per_ngram": 2}
_QWEN4 = {**_INDEXER, **_NGRAMS}
_DOTS3 = {
    "head_dim": 32,
    **{f"swa_{name}": size for name, size in (("num_attention_heads", 4), ("num_key_value_heads", 4))},
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_GEMMA4_SMALL = {**_SHARED_CACHES, "global_head_dim": 32}
_GEMMA4_LARGE = {  # experts, global layers whose values are their keys
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 0,
}
_INKLING = {"rel_extent": 12, "log_scaling_n_floor": 16, "unpadded_vocab_size": 318}
_LLAMA4 = {"interleave_moe_layer_step": 2, "floor_scale": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 64,
        "global_config": {"hidden_size": 128},
        "encoder_config": {"hidden_size_global": 128},
        "decoder_config": {"hidden_size_global": 128},
    },
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": _MROPE,
            "full_attention": None,
        },
        **_SLIDING_AND_FULL,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    },
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        **_SLIDING_AND_FULL,
    },
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense", "sparse"]},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    },
    "emu3": {
        "vocabulary_map": {"<image>": 300, "<|extra_200|>": 301, "<|visual token 000000|>": 302},
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 16, "attn_resolutions": []},
    },
    "dots3_note_text": _DOTS3,
    "gemma3n": {"text_config": _SHARED_CACHES},
    "gemma3n_text": _SHARED_CACHES,
    "gemma4": {"text_config": _GEMMA4_LARGE, "vision_config": {"position_embedding_size": 16}},
    "gemma4_text": _GEMMA4_SMALL,
    "gemma4_unified": {
        "text_config": {"global_head_dim": 32},
        "vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 16},
    },
    "gemma4_unified_text": _GEMMA4_SMALL,
    "got_ocr2": {"vision_config": {"mlp_dim": 96, "output_channels": 32}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA_AND_FULL,
    "hrm_text": {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "inkling2_text": {**_INKLING, "n_layers_per_attn_res_block": 1},
    "inkling_text": {**_INKLING, "logits_mup_width_multiplier": 2.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "laguna": {**_SLIDING_AND_FULL, "num_attention_heads_per_layer": [2, 4]},
    "lfm2": _CONV_AND_FULL,
    "lfm2_moe": {**_CONV_AND_FULL, "num_dense_layers": 1},
    "llama4": {
        "text_config": _LLAMA4,
        "vision_config": {"projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64},
    },
    "llama4_text": _LLAMA4,
    "longcat_flash": {"num_layers": 1},
    "mamba2": {"num_heads": 8},
    "mellum": _SLIDING_AND_FULL,
    "ministral": _SLIDING_AND_FULL,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 12,
    },
    "mllama": {
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    },
    "phi4_multimodal": {
        "audio_config": {
            "nemo_conv_channels": 64,
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
        },
    },
    "phi3": {"sliding_window": 8},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_norm_std": 0.02,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "starcoder2": {"sliding_window": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "num_heads": 4},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 2},
    "zaya": {"num_experts_per_tok": 1, "sliding_window": 8, "layer_types": ["hybrid_sliding", "hybrid"]},
}
"""Model type -> configuration fields; sub-configurations nested."""

"""Tiny random checkpoints that also read images or audio, as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from tests.support.tiny_models import COMMON, VOCAB, WINDOW, write_tokenizer
from topw_deploy.export.source.text_decoder import Composite, allow_missing_packages

TEXT: dict[str, Any] = {**COMMON, "head_dim": 16}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {"depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
IMAGE = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def _text_config(*without: str, **others: Any) -> dict[str, Any]:
    return {name: value for name, value in TEXT.items() if name not in without} | others


def _moe_config(**others: Any) -> dict[str, Any]:
    return _text_config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **others)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llava": lambda: hf.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **VISION},
        text_config={"model_type": "llama", **TEXT},
        image_token_index=300,
    ),
    "gemma3": lambda: hf.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **VISION},
        text_config=_text_config(**SLIDING, query_pre_attn_scalar=16),
        image_token_index=300,
        mm_tokens_per_image=1,
    ),
    "gemma3n": lambda: hf.Gemma3nConfig(
        text_config=_text_config(
            **SLIDING,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB - 16,
            num_kv_shared_layers=0,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0, 0.0],
            altup_num_inputs=2,
        ),
        vision_config={"vocab_offset": VOCAB - 16, "vocab_size": 8, "hidden_size": 16},
        audio_config={
            "vocab_offset": VOCAB - 8,
            "vocab_size": 8,
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
        },
        image_token_id=300,
        audio_token_id=301,
    ),
    "gemma4": lambda: hf.Gemma4Config(
        text_config=_text_config(**SLIDING, global_head_dim=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
        vision_config={**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        audio_config=None,
        image_token_id=300,
    ),
    "mistral3": lambda: hf.Mistral3Config(
        vision_config={"model_type": "pixtral", **VISION, "head_dim": 8},
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        image_token_index=300,
    ),
    "ministral3": lambda: hf.Mistral3Config(
        vision_config={"model_type": "pixtral", **VISION, "head_dim": 8},
        text_config={"model_type": "ministral3", **TEXT},
        image_token_index=300,
        tie_word_embeddings=True,
    ),
    "llama4": lambda: hf.Llama4Config(
        vision_config={**VISION, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
        text_config=_text_config(
            intermediate_size_mlp=48,
            num_local_experts=2,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=2,
        ),
        image_token_index=300,
    ),
    "smolvlm": lambda: hf.SmolVLMConfig(
        vision_config=VISION, text_config={"model_type": "llama", **TEXT}, image_token_id=300, scale_factor=1
    ),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        vision_config={"depth": 1, "num_heads": 2, "embed_dim": 16, "hidden_size": 32},
        text_config=_text_config("head_dim", rope_parameters={**SECTIONS, "mrope_section": [2, 1, 1]}),
        tie_word_embeddings=True,
        **IMAGE,
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        vision_config={"hidden_size": 16, **QWEN_VISION},
        text_config=_text_config("head_dim", num_attention_heads=2, rope_parameters=SECTIONS),
        **IMAGE,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        vision_config={"hidden_size": 16, **QWEN_VISION, "deepstack_visual_indexes": [0]},
        text_config=_text_config(rope_parameters={**SECTIONS, "mrope_interleaved": True}),
        tie_word_embeddings=True,
        **IMAGE,
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        vision_config={"hidden_size": 16, **QWEN_VISION, "deepstack_visual_indexes": [0]},
        text_config=_moe_config(rope_parameters={**SECTIONS, "mrope_interleaved": True}),
        **IMAGE,
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        vision_config={"hidden_size": 16, **QWEN_VISION},
        text_config=_text_config(
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            rope_parameters={**SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
        ),
        **IMAGE,
    ),
    "glm4v": lambda: hf.Glm4vConfig(
        vision_config={"hidden_size": 16, **QWEN_VISION},
        text_config=_text_config("head_dim", num_attention_heads=2, rope_parameters=SECTIONS),
        image_token_id=300,
        video_token_id=301,
    ),
    "internvl": lambda: hf.InternVLConfig(
        vision_config={**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        text_config=_text_config("head_dim", model_type="qwen2"),
        image_token_id=300,
    ),
    "idefics2": lambda: hf.Idefics2Config(
        vision_config=VISION,
        text_config={"model_type": "mistral", **TEXT},
        perceiver_config={
            "resampler_n_latents": 2,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
        },
        image_token_id=300,
    ),
    "lfm2_vl": lambda: hf.Lfm2VlConfig(
        vision_config={**VISION, "model_type": "siglip2_vision_model", "num_patches": 4, "patch_size": 4},
        text_config=_text_config("head_dim", model_type="lfm2", layer_types=["conv", "full_attention"]),
        image_token_id=300,
    ),
    "paligemma2": lambda: hf.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **VISION, "projection_dim": 32},
        text_config={"model_type": "gemma2", **TEXT, "sliding_window": WINDOW, "final_logit_softcapping": 1.0},
        image_token_id=300,
        projection_dim=32,
    ),
    "aya_vision": lambda: hf.AyaVisionConfig(
        vision_config={"model_type": "siglip_vision_model", **VISION},
        text_config={"model_type": "cohere2", **TEXT, **SLIDING},
        image_token_id=300,
    ),
    "granite_speech": lambda: hf.GraniteSpeechConfig(
        encoder_config={
            "hidden_dim": 16,
            "num_layers": 1,
            "num_heads": 2,
            "dim_head": 8,
            "input_dim": 8,
            "output_dim": 8,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "encoder_hidden_size": 16,
        },
        text_config={"model_type": "granite", **TEXT, "logits_scaling": 8.0},
        audio_token_index=300,
        has_lora_adapter=False,
    ),
    "qwen2_5_omni": lambda: hf.Qwen2_5OmniThinkerConfig(
        text_config=_text_config("head_dim", num_attention_heads=2, rope_parameters=SECTIONS),
        vision_config={"hidden_size": 16, **QWEN_VISION},
        audio_config={
            "d_model": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "num_mel_bins": 8,
            "output_dim": 32,
        },
    ),
    "voxtral": lambda: hf.VoxtralConfig(
        audio_config={**VISION, "num_mel_bins": 8, "max_source_positions": 8},
        text_config={"model_type": "llama", **TEXT},
        audio_token_id=300,
    ),
}


def make_composite(kind: str) -> PreTrainedModel:
    """Random float32, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    composite = Composite.of(CONFIGS[kind]())
    assert composite is not None
    with allow_missing_packages():
        model = composite.model._from_config(composite.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def write_composite(folder: Path, kind: str) -> PreTrainedModel:
    """Save the whole model and a tokenizer; returns the model."""
    model = make_composite(kind)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model

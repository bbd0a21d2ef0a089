"""Tiny configurations of any architecture, from the fields of its configuration class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from benchmarks.coverage.overrides import OVERRIDES

VOCAB, CONTEXT, WINDOW, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 320, 256, 8, 64, 4, 2, 16
MOST_LAYERS = 4
SELECTED = 48  # tokens that sparse attention selects; an export that reads more is verified on longer prompts

# Heads have 16 numbers, because GroupQueryAttention cannot rotate 8. In latent attention, keys are wider than values.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "original_max_position_embeddings",
            "model_max_length",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "context_length",
        ),
        CONTEXT,
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_dim", "word_embed_proj_dim", "text_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "output_proj_dims", "embed_dim", "input_size"), HIDDEN),
    **dict.fromkeys(
        (
            "intermediate_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "ffn_dim",
            "ffn_hidden_size",
            "encoder_ffn_dim",
            "feed_forward_size",
            "dim_ff",
            "dff",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "swa_num_attention_heads",
            "attention_heads",
            "encoder_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "index_n_heads",
            "conf_num_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "attention_head_size", "dim_head", "query_pre_attn_scalar"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim", "global_head_dim"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), HEAD_DIM),
    **dict.fromkeys(("rotary_dim", "laurel_rank", "gated_norm_rank", "adapter_rank", "hc_lowrank"), 8),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        4,
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "n_group", "zero_expert_num"), 2
    ),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "attention_window_size",
            "attention_chunk_size",
            "local_attention",
            "window_size",
            "keep_window_size",
        ),
        WINDOW,
    ),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "index_topk": SELECTED,
    **dict.fromkeys(("n_groups", "mamba_n_groups", "linear_num_key_heads"), 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("image_size", "patch_size"), 16),
    "num_position_embeddings": 16,
}
"""Configuration field -> tiny value."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "num_blocks")
_HEADS = ("num_attention_heads", "n_heads", "n_head")


def tiny_config(model_type: str) -> Any:
    """The tiny configuration of `model_type`."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    return cls(**tiny_settings(cls, {}, OVERRIDES.get(model_type, {})))


def tiny_settings(cls: Any, initial: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `cls`: tiny sizes, one layer of each kind, token ids; `overrides` win.

    initial: what a composite configuration passes to `cls`.
    """
    defaults = {each.name: _default_value(each, initial) for each in fields(cls)}
    sizes = {name: value for name, value in SIZES.items() if isinstance(defaults.get(name), int)}
    sizes |= {
        name: least for name, least in (("n_group", 1), ("first_k_dense_replace", 0)) if defaults.get(name) == least
    }
    if "head_dim" in defaults:
        sizes["head_dim"] = HEAD_DIM
    if "num_key_value_heads" in defaults:
        sizes["num_key_value_heads"] = _kv_heads(defaults)
    tokens = {name: value for name, value in TOKENS.items() if name in defaults}
    settings = {**initial, **sizes, **tokens, **_layer_settings(cls, initial, defaults)}
    for name, spec in cls.sub_configs_defaults.items():
        settings[name] = _part_settings(spec, overrides.get(name, {}))
    return settings | {name: value for name, value in overrides.items() if name not in cls.sub_configs_defaults}


def _part_settings(spec: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    named = getattr(spec.config_class, "model_type", "") == spec.model_type
    cls = spec.config_class if named else CONFIG_MAPPING[spec.model_type]
    return {**tiny_settings(cls, spec.init_kwargs, overrides), "model_type": spec.model_type}


def _default_value(field: Any, initial: Mapping[str, Any]) -> Any:
    if field.name in initial:
        return initial[field.name]
    return None if field.default is MISSING else field.default


def _kv_heads(defaults: Mapping[str, Any]) -> int:
    """HEADS if the default equals the default number of heads, 1 if it is 1, else KV_HEADS."""
    default = defaults["num_key_value_heads"]
    if default == 1:
        return 1
    if "kv_lora_rank" in defaults:  # latent attention has a key per head
        return HEADS
    heads = next((defaults[name] for name in _HEADS if name in defaults), None)
    return HEADS if default is not None and default == heads else KV_HEADS


def _layer_settings(cls: Any, initial: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Number of layers and per-layer lists: the first layer of each kind, in order."""
    depth_field = next((name for name in _DEPTHS if name in defaults), None)
    if depth_field is None:
        return {}
    whole = cls(**initial)
    depth = getattr(whole, depth_field)
    lists = {name: value for name in defaults if _is_kinds(value := vars(whole).get(name), depth)}
    chosen = _first_of_each(list(lists.values()), depth)
    return {depth_field: len(chosen), **{name: [value[i] for i in chosen] for name, value in lists.items()}}


def _is_kinds(value: Any, depth: int) -> bool:
    """Whether `value` lists the kind of every layer. The configuration derives lists of sizes itself."""
    return (
        isinstance(value, list | tuple)
        and len(value) == depth
        and all(isinstance(each, str | bool | None) or each in (0, 1) for each in value)
    )


def _first_of_each(lists: list[Any], depth: int) -> list[int]:
    """Indices of the layers with a new kind in any list; at least two, at most MOST_LAYERS."""
    seen: list[set[Any]] = [set() for _ in lists]
    chosen = []
    for layer in range(depth):
        if any(values[layer] not in known for values, known in zip(lists, seen, strict=True)):
            chosen.append(layer)
            for values, known in zip(lists, seen, strict=True):
                known.add(values[layer])
    rest = [layer for layer in range(depth) if layer not in chosen]
    return sorted([*chosen, *rest[: max(0, 2 - len(chosen))]])[:MOST_LAYERS]

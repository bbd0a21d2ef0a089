"""The model architectures of GGUF files: tensor names, and metadata as a transformers configuration.

GGUF's names are those of llama.cpp: `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`. Its converter
changes some tensors, and the functions here undo it:
    llama: rows of q and k; the two that rotate together are adjacent, and half a head apart in transformers.
    falcon, bloom: rows of qkv; all q come first, then all k and all v, and in transformers they come by groups.
    gpt2: matrices; rows are outputs, and inputs in transformers.
    gemma, nemotron: norms are stored plus one.
    experts: all of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError, UnsupportedModelError


def refused(what: str) -> UnsupportedModelError:
    """The error for a feature of a GGUF file that the export does not read."""
    return UnsupportedModelError(f"{what}; export the model's Hugging Face checkpoint.")


Metadata = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
How = dict[str, Any]
"""Keywords of GgufWeight: how a weight is taken from a tensor of the file."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_DENSE = _ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {name: f"mlp.experts.{{expert}}.{name.split('_')[1]}_proj" for name in ("ffn_gate_exps", "ffn_up_exps")}
_EXPERTS["ffn_down_exps"] = "mlp.experts.{expert}.down_proj"
_EXPERTS["ffn_gate_inp"] = "mlp.gate"
_SANDWICH = _DENSE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Metadata of every architecture -> the configuration's name.
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KEPT = _COMMON | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NORM = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
# Metadata that configurations state in another way, or that does not change the model.
_READ_ELSEWHERE = {
    *("vocab_size", "attention.value_length", "rope.freq_base", "rope.dimension_count", "tensor_data_layout"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scale_linear"),
}
TABLE = "token_embd.weight"
ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration."""
_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


@dataclass(frozen=True)
class Architecture:
    """How to read one of GGUF's architectures.

    model_type: of transformers.
    layer: name in a layer -> name in transformers' layer.
    top: the same for names outside layers.
    layers: the prefix of layers in transformers.
    keys: metadata -> name in the configuration.
    fixed: the configuration's other values.
    partial: whether the model can rotate a part of each head.
    norm_offset: what llama.cpp's converter added to the weights of norms.
    orders: name in a layer -> function (rows, heads, key-value heads) -> the file's row of each row.
    transposed: names in a layer whose matrices are transposed.
    squeezed: names in a layer -> (rank in transformers, the axis of size 1 that the file lacks).
    other_norm: the name of `attn_norm` in a layer that has no `attn_norm_2`.
    biases: name in the configuration -> name in a layer whose bias it announces.
    other_keys: metadata that `finish` reads.
    finish: completes the configuration: (configuration, metadata without the architecture's prefix, shapes).
    """

    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: _DENSE)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    keys: Mapping[str, str] = field(default_factory=lambda: _KEPT)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False
    norm_offset: float = 0.0
    orders: Mapping[str, Callable[[int, int, int], np.ndarray]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    squeezed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    other_norm: str = ""
    biases: Mapping[str, str] = field(default_factory=dict)
    other_keys: frozenset[str] = frozenset()
    finish: Callable[[dict[str, Any], Metadata, Shapes], None] | None = None

    def place(self, name: str, shapes: Shapes, metadata: Metadata) -> Iterator[tuple[str, How]]:
        """Yield each (transformers' name, how to take it) that the tensor `name` holds; nothing for an unknown name.

        shapes: of all tensors.
        """
        shape = shapes[name]
        base, _, end = name.rpartition(".")
        block, number, part = (*base.split(".", 2), "", "")[:3]
        if block == "blk" and number.isdigit() and part in self.layer:
            found = f"{self.layers}.{number}.{self.layer[part]}"
            if part == "attn_norm" and self.other_norm and f"blk.{number}.attn_norm_2.weight" not in shapes:
                found = f"{self.layers}.{number}.{self.other_norm}"
        elif base in self.top:
            found = self.top[base]
        else:
            return
        if "{expert}" in found:
            for expert in range(shape[0]):
                yield f"{found.format(expert=expert)}.{end}", {"place": (expert,)}
            return
        how: How = {}
        if self.norm_offset and base.endswith("norm") and end == "weight":
            how["change"] = lambda values: values - np.float32(self.norm_offset)
        if part in self.orders:
            how["order"] = self.orders[part](shape[0], *_heads(metadata))
        if part in self.transposed and end == "weight":
            how["transposed"] = True
        rank, axis = self.squeezed.get(part, (0, 0))
        if end == "weight" and len(shape) < rank:
            how["shape"] = (*shape[:axis], 1, *shape[axis:])
        yield f"{found}.{end}", how


def _heads(metadata: Metadata) -> tuple[int, int]:
    """(the number of heads, the number of key-value heads). The latter can be a list with 0 for other layers."""
    prefix = metadata.get("general.architecture")
    heads = metadata.get(f"{prefix}.attention.head_count")
    kv_heads = metadata.get(f"{prefix}.attention.head_count_kv", heads)
    if isinstance(kv_heads, list) and len(different := set(kv_heads) - {0}) == 1:
        kv_heads = different.pop()
    found = heads, kv_heads
    for number in found:
        if not isinstance(number, int) or number < 1:
            raise refused(f"the GGUF file's number of attention heads is {number!r}, but must be one integer")
    return int(found[0] or 0), int(found[1] or 0)


def _order(shape: tuple[int, ...], axes: tuple[int, ...], rows: int) -> np.ndarray:
    """Return the row numbers, reshaped to `shape`, transposed by `axes` and flattened.

    Raises SourceError if `rows` is not a multiple of the shape's fixed sizes.
    """
    if rows % max(1, int(np.prod([size for size in shape if size > 0]))):
        raise SourceError(f"a tensor of {rows} rows of a GGUF file does not fit its heads; fetch the file again.")
    return np.arange(rows).reshape(shape).transpose(axes).reshape(-1)


def _interleaved_q(rows: int, heads: int, _kv_heads: int) -> np.ndarray:
    """Return the file's row for each row of q. Within a head, the file interleaves the two halves."""
    return _order((heads, -1, 2), (0, 2, 1), rows)


def _grouped(rows: int, heads: int, kv_heads: int) -> np.ndarray:
    """Return the file's row for each row of the qkv of falcon or bloom.

    The model stores the q heads of a group, then its k, then its v. The file stores all q, all k, all v.
    """
    width, per_group = rows // (heads + 2 * kv_heads), heads // kv_heads
    q, k, v = np.split(_order((-1, width), (0, 1), rows).reshape(-1, width), (heads, heads + kv_heads))
    groups = [q.reshape(kv_heads, per_group, width), k[:, None], v[:, None]]
    return np.concatenate(groups, axis=1).reshape(-1)


def configuration(
    path: Path, architecture: Architecture, metadata: Metadata, shapes: Shapes, read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """Return the config.json of a model.

    shapes: of its tensors. read: returns the values of one.
    Raises UnsupportedModelError for metadata that the configuration cannot express.
    """
    prefix = f"{metadata['general.architecture']}."
    values = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    unknown = sorted(values.keys() - architecture.keys.keys() - architecture.other_keys - _READ_ELSEWHERE)
    if unknown:
        raise refused(f"{path} states {prefix}{unknown[0]} = {values[unknown[0]]!r}, which is unknown here")
    missing = [key for key in _COMMON if key not in values]
    if missing or TABLE not in shapes:
        raise SourceError(
            f"{path} lacks {prefix + missing[0] if missing else 'token_embd.weight'}; fetch it again, or choose a file "
            "that holds a whole model."
        )
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.fixed}
    config |= {name: values[key] for key, name in architecture.keys.items() if key in values}
    config["vocab_size"] = shapes[TABLE][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config |= {name: f"blk.0.{part}.bias" in shapes for name, part in architecture.biases.items()}
    config |= {full: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, full in _SPECIAL.items()}
    heads, kv_heads = _heads(metadata)
    per_layer = values.get("attention.head_count_kv")
    if isinstance(per_layer, list):
        config[architecture.keys["attention.head_count_kv"]] = kv_heads
        config["layer_types"] = ["full_attention" if each else "conv" for each in per_layer]
    head_dim = values.get("attention.key_length", values["embedding_length"] // heads)
    if values.get("attention.value_length", head_dim) != head_dim:
        raise refused(f"{path} has keys of {head_dim} but values of {values['attention.value_length']} numbers a head")
    config["rope_parameters"] = _rotary(path, values, int(head_dim), architecture.partial)
    factors = {name: read(name).tolist() for name in ROTARY_FACTORS if name in shapes}
    if factors:
        _add_factors(config, values, factors)
    if architecture.finish is not None:
        architecture.finish(config, values, shapes)
    return config


def _rotary(path: Path, values: Metadata, head_dim: int, partial: bool) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values.get("rope.freq_base", 10000.0))}
    rotated = values.get("rope.dimension_count", head_dim)
    if rotated != head_dim and not partial:
        raise refused(f"{path} rotates {rotated} of {head_dim} numbers a head, but transformers rotates all of them")
    if partial:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind, factor = values.get("rope.scaling.type", "none"), values.get("rope.scaling.factor")
    factor = factor if factor is not None else values.get("rope.scale_linear")
    if kind == "none" and "rope.scale_linear" in values:
        kind = "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise refused(f"{path} scales its rotary positions by {kind!r}, but only linear, yarn and longrope are read")
    if kind in ("linear", "yarn") and factor is not None and factor != 1:
        rope |= {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn":
            original = values.get("rope.scaling.original_context_length", values["context_length"])
            rope["original_max_position_embeddings"] = original
    return rope


def _add_factors(config: Metadata, values: Metadata, factors: dict[str, list[float]]) -> None:
    """Add the divisors of rotary frequencies, as transformers' longrope has them.

    `rope_freqs` (Llama 3) holds at any length: its original context is the whole.
    """
    most = config["max_position_embeddings"]
    original = values.get("rope.scaling.original_context_length", most)
    always, long, short = (factors.get(name) for name in ROTARY_FACTORS)
    config["original_max_position_embeddings"] = most if always else original
    config["rope_parameters"] |= {
        "rope_type": "longrope",
        "short_factor": always or short,
        "long_factor": always or long,
        "factor": 1.0 if always else most / original,
        "attention_factor": float(values.get("rope.scaling.attn_factor", 1.0)),
        "original_max_position_embeddings": config["original_max_position_embeddings"],
    }


def _finish_gemma2(config: Metadata, _values: Metadata, _shapes: Shapes) -> None:
    _set_gemma_scale(config, 46)


def _finish_gemma3(config: Metadata, values: Metadata, _shapes: Shapes) -> None:
    _set_gemma_scale(config, 62)
    layers, period = config["num_hidden_layers"], values.get("attention.sliding_window_pattern", 6)
    slides = period if isinstance(period, list) else [bool((layer + 1) % period) for layer in range(layers)]
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
    local = {"rope_type": "default", "rope_theta": float(values.get("rope.freq_base_swa", 10000.0))}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _set_gemma_scale(config: Metadata, largest: int) -> None:
    """Set the size whose square root divides the scores: that of a head, except in the model of `largest` layers."""
    whole = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = whole if config["num_hidden_layers"] == largest else config["head_dim"]


def _finish_falcon(config: Metadata, _values: Metadata, shapes: Shapes) -> None:
    new = "blk.0.attn_norm_2.weight" in shapes
    config |= {"new_decoder_architecture": new, "multi_query": config.get("num_kv_heads") == 1}


def _finish_lfm2(config: Metadata, _values: Metadata, shapes: Shapes) -> None:
    config["conv_bias"] = any(name.endswith("shortconv.in_proj.bias") for name in shapes)


_STARCODER_LAYER = _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_PERMUTED = {"attn_q": _interleaved_q, "attn_k": lambda rows, _, kv_heads: _interleaved_q(rows, kv_heads, kv_heads)}
_MOE_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_BLOOM_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_BLOOM_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
ARCHITECTURES = {
    "llama": Architecture("llama", orders=_PERMUTED, biases=_BIASES),
    "llama with experts": Architecture(
        "mixtral",
        layer=_ATTENTION
        | {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        },
        keys=_KEPT | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        orders=_PERMUTED,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", layer=_DENSE | _HEAD_NORMS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        layer=_ATTENTION
        | _EXPERTS
        | {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
        keys=_KEPT | _MOE_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        squeezed={"ffn_gate_inp_shexp": (2, 0)},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        layer=_ATTENTION | _HEAD_NORMS | _EXPERTS,
        keys=_KEPT | _MOE_KEYS,
        fixed={"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2", layer=_SANDWICH, norm_offset=1.0, keys=_KEPT | _WINDOW | _CAPS, finish=_finish_gemma2
    ),
    "gemma3": Architecture(
        "gemma3_text",
        layer=_SANDWICH | _HEAD_NORMS,
        norm_offset=1.0,
        keys=_KEPT | _WINDOW | _CAPS,
        other_keys=frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
        finish=_finish_gemma3,
    ),
    "phi3": Architecture(
        "phi3",
        layer=_ATTENTION
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        keys=_KEPT | _WINDOW,
        partial=True,
    ),
    "stablelm": Architecture(
        "stablelm",
        keys=_KEPT
        | {"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        partial=True,
        biases={"use_qkv_bias": "attn_q"},
    ),
    "nemotron": Architecture(
        "nemotron",
        layer=_ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        norm_offset=1.0,
        keys=_KEPT | {"attention.layer_norm_epsilon": "norm_eps"},
        partial=True,
        biases=_BIASES,
    ),
    "lfm2": Architecture(
        "lfm2",
        layer={
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
        top=_TOP | {"token_embd_norm": "model.embedding_norm"},
        keys=_KEPT | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False},
        squeezed={"shortconv.conv": (3, 1)},
        finish=_finish_lfm2,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        layer=_STARCODER_LAYER,
        keys=_KEPT | _WINDOW | {"attention.layer_norm_epsilon": "norm_epsilon"},
        biases={"use_bias": "attn_q"},
    ),
    "gpt2": Architecture(
        "gpt2",
        layer=_GPT2_LAYER,
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        keys=_COMMON | _NORM | {"context_length": "n_positions", "feed_forward_length": "n_inner"},
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "bloom": Architecture(
        "bloom",
        layer=_BLOOM_LAYER,
        top=_BLOOM_TOP,
        layers="transformer.h",
        keys=_COMMON | _NORM,
        other_keys=frozenset({"attention.head_count_kv"}),
        orders={"attn_qkv": _grouped},
    ),
    "falcon": Architecture(
        "falcon",
        layer=_BLOOM_LAYER | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
        top=_BLOOM_TOP,
        layers="transformer.h",
        other_norm="input_layernorm",
        keys=_COMMON | _NORM | {"attention.head_count_kv": "num_kv_heads", "feed_forward_length": "ffn_hidden_size"},
        orders={"attn_qkv": _grouped},
        finish=_finish_falcon,
    ),
}

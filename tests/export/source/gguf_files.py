"""GGUF files of tiny models, written by gguf's own writer with the names and changes of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)

from tests.support.browser import run_node
from tests.support.tiny_models import COMMON, WINDOW, make_model, write_tokenizer

WIDE = {**COMMON, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # whole blocks of 256
SHORT = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: Mapping[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**WIDE, tie_word_embeddings=False),
    "llama with experts": MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": Qwen2Config(**WIDE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**WIDE, tie_word_embeddings=False),
    "qwen2moe": Qwen2MoeConfig(
        **WIDE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
    ),
    "qwen3moe": Qwen3MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True
    ),
    "gemma": GemmaConfig(**WIDE),
    "gemma2": Gemma2Config(**WIDE, sliding_window=WINDOW, query_pre_attn_scalar=64, attn_logit_softcapping=2.0),
    "gemma3": Gemma3TextConfig(
        **WIDE,
        sliding_window=WINDOW,
        query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    ),
    "phi3": Phi3Config(**WIDE, sliding_window=WINDOW),
    "starcoder2": Starcoder2Config(**WIDE, sliding_window=WINDOW),
    "stablelm": StableLmConfig(**WIDE, use_qkv_bias=True, use_parallel_residual=False),
    "nemotron": NemotronConfig(**WIDE),
    "lfm2": Lfm2Config(**WIDE, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "gpt2": GPT2Config(**SHORT, n_embd=256, n_layer=2, n_head=4, n_positions=256),
    "bloom": BloomConfig(**SHORT, hidden_size=256, n_layer=2, n_head=4),
    "falcon": FalconConfig(
        **SHORT, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2,
        new_decoder_architecture=True, max_position_embeddings=256,
    ),
}  # fmt: skip
EXACT = ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS")
WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
_ARCHITECTURES = {value: number for number, value in gguf.MODEL_ARCH_NAMES.items()}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores q and k of llama: pairs that rotate together are adjacent."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def split_qkv(rows: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """As llama.cpp's converter stores qkv of falcon and bloom: all q, then all k, then all v."""
    grouped = rows.reshape(kv_heads, heads // kv_heads + 2, -1)
    parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return np.concatenate([part.reshape(-1) for part in parts]).reshape(rows.shape)


def gguf_tensors(model: PreTrainedModel, name: str) -> dict[str, np.ndarray]:
    """The model's tensors as llama.cpp's converter names and changes them."""
    config = model.config
    table = gguf.get_tensor_name_map(_ARCHITECTURES[name.split()[0]], config.num_hidden_layers)
    state = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", heads)
    found = {}
    for key, values in state.items():
        base, _, end = key.rpartition(".")
        if end == "gate_up_proj":
            layer, (gate, up) = re.findall(r"\d+", key)[0], np.split(values, 2, axis=1)
            found |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        if end == "down_proj":
            base, end = f"{base}.down_proj", "weight"
        target = table.get_name(base.removeprefix("transformer.") if name == "bloom" else base)
        assert target is not None, key
        if name.startswith("llama") and target.endswith(("attn_q", "attn_k")):
            values = permute(values, heads if target.endswith("q") else kv_heads)
        if name in ("falcon", "bloom") and target.endswith("attn_qkv"):
            values = split_qkv(values, heads, kv_heads)
        if name == "gpt2" and base.endswith(("c_attn", "c_proj", "c_fc")) and end == "weight":
            values = np.ascontiguousarray(values.T)
        if name.startswith(("gemma", "nemotron")) and base.endswith("norm") and end == "weight":
            values = values + 1
        if target.endswith("shortconv.conv"):
            values = values[:, 0]
        if target.endswith("ffn_gate_inp_shexp"):
            values = values[0]
        found[f"{target}.{end}"] = values
    return found


def _add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig, name: str) -> None:
    """The metadata of all models."""
    width = next(
        (size for key in ("intermediate_size", "ffn_hidden_size") if (size := getattr(config, key, None))), None
    )
    writer.add_context_length(getattr(config, "max_position_embeddings", 256))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(width or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    if name == "lfm2":
        writer.add_head_count_kv([0, kv_heads])
    elif kv_heads:
        writer.add_head_count_kv(kv_heads)
    for key in ("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"):
        if hasattr(config, key):
            writer.add_layer_norm_eps(getattr(config, key))
    for key in ("rms_norm_eps", "norm_eps"):
        if hasattr(config, key):
            writer.add_layer_norm_rms_eps(getattr(config, key))
    if name == "nemotron":
        writer.add_layer_norm_eps(config.norm_eps)
    if "head_dim" in config.to_dict():
        writer.add_key_length(64)
        writer.add_value_length(64)


def _add_rotation(writer: gguf.GGUFWriter, config: PreTrainedConfig, name: str) -> None:
    """The metadata of rotary positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(64 * rope["partial_rotary_factor"]))
    if name == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_sliding_window_pattern(2)


def _add_parts(writer: gguf.GGUFWriter, config: PreTrainedConfig, name: str) -> None:
    """The metadata of what only some models have."""
    if name == "gemma2":
        writer.add_attn_logit_softcapping(2.0)
        writer.add_final_logit_softcapping(30.0)
    if getattr(config, "sliding_window", None) and name != "qwen2moe":
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(256)
    if name == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(512)
    if name == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if name == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)


def write_gguf(
    path: Path,
    name: str,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] | None = None,
    change: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> PreTrainedModel:
    """Write a tiny model of an architecture as a GGUF file whose matrices have the type `kind`. Returns the model.

    kinds: other types, by a part of the tensor's name.
    change: other metadata.
    tensors: other tensors; None leaves one out.
    """
    model = make_model(CONFIGS[name])
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, so that a mistake in them shows
            parameter.data += 0.1 * parameter.data.new_tensor(rng.standard_normal(len(parameter)))
    writer = gguf.GGUFWriter(path, name.split()[0])
    for add in (_add_sizes, _add_rotation, _add_parts):
        add(writer, model.config, name)
    add_tokenizer(writer, path.parent / "tokenizer")
    for key, value in (change or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for key, values in {**gguf_tensors(model, name), **(tensors or {})}.items():
        if values is None:
            continue
        chosen = next((other for part, other in (kinds or {}).items() if part in key), kind)
        wanted = (
            chosen if values.ndim > 1 and not any(part in key for part in ("gate_inp", "shortconv.conv")) else "F32"
        )
        made = Kind[wanted]
        try:
            raw = gguf.quantize(values, made)
        except NotImplementedError:
            raw = random_blocks(values.shape, wanted)
        writer.add_tensor(key, raw, raw_dtype=made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random bytes with scales of 2 ** -10 to 2 ** -6: gguf decodes K types, but does not make them."""
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rng = np.random.default_rng(int(np.prod(shape)))
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    for place in places.get(kind, (0, 2) if kind in WITH_MINIMA else (0,)):
        scales = np.exp2(rng.uniform(-14, -11, raw.shape[:-1])).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    write_tokenizer(folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = {number: token for token, number in made.get_vocab().items()}
    count = len(names)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(320)])
    writer.add_token_types([3 if number < 3 else 1 if number < count else 5 for number in range(320)])
    merges = json.loads(made.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def logits_in_llama_cpp(file: Path, ids: Sequence[int], scratch: Path) -> np.ndarray:
    """llama.cpp's logits for `ids`, float32 [tokens, vocabulary]; needs `make browser`. scratch: a folder."""
    (scratch / "jobs.json").write_text(json.dumps([[str(file), list(ids), str(scratch / "logits")]]), encoding="utf-8")
    run_node(Path(__file__).with_name("llama_cpp.mjs"), str(scratch / "jobs.json"))
    return np.fromfile(scratch / "logits", np.float32).reshape(len(ids), -1)

"""Random models of about 50 M parameters whose layers keep other states than keys and values of full length.

Also their folders by onnxruntime-genai's builder. Used by `python -m benchmarks.kv --kind NAME`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import CACHE, save_random_model

_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_CONVOLUTIONS = (["conv"] * 2 + ["full_attention"]) * 4
_WINDOWS = (["sliding_attention"] * 5 + ["full_attention"]) * 2
_DELTA_NETS = (["linear_attention"] * 3 + ["full_attention"]) * 3
_QWEN3_5 = {
    **_SIZES,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "layer_types": _DELTA_NETS,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}

# Kind -> (prefix of transformers' classes, configuration).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        {
            **_SIZES,
            "intermediate_size": 1408,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": len(_CONVOLUTIONS),
            "layer_types": _CONVOLUTIONS,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_SIZES,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **_SIZES,
            "intermediate_size": 1408,
            "num_hidden_layers": len(_WINDOWS),
            "query_pre_attn_scalar": 64,
            "sliding_window": 512,
            "layer_types": _WINDOWS,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": _QWEN3_5,
            "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
                              "out_hidden_size": 512},
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def kind_model(kind: str) -> Path:
    """The folder of the random model, made once. kind: a name in KINDS."""
    prefix, config = KINDS[kind]
    ending = {"gemma3": ("TextConfig", "ForCausalLM"), "qwen3_5": ("Config", "ForConditionalGeneration")}
    config_class, model_class = (prefix + end for end in ending.get(kind, ("Config", "ForCausalLM")))
    folder = CACHE / f"{kind}-50m"
    if not (folder / "tokenizer.json").exists():
        save_random_model(folder, config_class, model_class, config)
        if kind == "gpt_oss":
            _encode_experts(folder)
    return folder


def _encode_experts(folder: Path) -> None:
    """Replace the experts of a gpt-oss checkpoint by random ones in MXFP4, as they are published."""
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*blocks, 16), np.uint8)
        tensors[f"{name}_scales"] = np.full(blocks, 120, np.uint8)  # 2**-7: weights deviate by 0.02
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def genai_folder(model: Path, dtype: str, python: Path) -> Path:
    """The folder that onnxruntime-genai's builder makes of `model` for the CPU, made once.

    python: the interpreter of the environment with onnxruntime-genai. Raises CalledProcessError where the builder
    fails.
    """
    folder = CACHE / "genai" / f"{model.name}-{dtype}"
    if not (folder / "genai_config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        source, prologue = _source_for_builder(model)
        run = f"import runpy; {prologue}runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__')"
        options = ["-p", dtype, "-e", "cpu", "--extra_options", "exclude_embeds=false"]
        command = [str(python), "-c", run, "-i", str(source), "-o", str(folder), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def _source_for_builder(model: Path) -> tuple[Path, str]:
    """A folder with the weights of `model`, and code to run before the builder.

    Version 0.18 needs an EOS, and reads Gemma 3's rotary base frequencies from fields that transformers 5 no longer
    has.
    """
    config = json.loads((model / "config.json").read_text("utf-8"))
    prologue = ""
    if config["model_type"] == "gemma3_text":
        ropes = config["rope_parameters"]
        config["rope_parameters"] = {**ropes, **ropes["full_attention"]}
        base = ropes["sliding_attention"]["rope_theta"]
        prologue = f"import transformers; transformers.Gemma3TextConfig.rope_local_base_freq = {base}; "
    elif config["model_type"] == "llama" and config["eos_token_id"] is None:
        config["eos_token_id"] = config["pad_token_id"]
    else:
        return model, prologue
    copy = model.with_name(f"{model.name}-for-genai")
    shutil.copytree(model, copy, dirs_exist_ok=True)
    (copy / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return copy, prologue

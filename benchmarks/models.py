"""The measured models, cached after first use. Weights are random: only shapes matter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

CACHE = Path(".cache/benchmarks")
HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS = 512, 12, 1408, 8, 4
LAST_NORM = 8.0  # logits deviate by 3.6, like a trained model's


def llama_50m(vocab_size: int = 32_000) -> Path:
    """A random Llama: 52 M parameters at a vocabulary of 32,000 (tied)."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 8192,
    }
    return _random_llama(CACHE / f"llama-{vocab_size}", vocab_size, sizes)


def mixtral_50m() -> Path:
    """A random Mixtral: 54 M parameters, 8 experts of which a token takes 2 (tied)."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 8192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    return _random_llama(CACHE / "mixtral-32000", 32_000, sizes, "Mixtral")


def _random_llama(folder: Path, vocab_size: int, sizes: dict[str, int], family: str = "Llama") -> Path:
    """Write a random Llama, or a random model of another family."""
    config = {
        **sizes,
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return save_random_model(folder, f"{family}Config", f"{family}ForCausalLM", config)


def save_random_model(folder: Path, config_class: str, model_class: str, config: dict[str, Any]) -> Path:
    """Write a random model with a tokenizer of bytes to `folder`, once.

    config_class, model_class: names in transformers; config: arguments of the first. LAST_NORM spreads the logits,
    which would be nearly equal and never certified.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    decoder = getattr(decoder, "language_model", decoder)
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.embedding_norm
    # The norms of Gemma 3 and Qwen 3.5 multiply by 1 + weight, and start at weight 0.
    torch.nn.init.constant_(norm.weight, LAST_NORM - 1 if float(norm.weight.detach().max()) == 0 else LAST_NORM)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    _save_tokenizer(folder, model.config.get_text_config().vocab_size)
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, filled up with unused entries: only ids matter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", *alphabet])}
    vocabulary |= {f"<unused{i}>": i for i in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<s>").save_pretrained(folder)


def export_once(model: Path | str, *options: str) -> Path:
    """The folder of `topw-export MODEL OUT OPTIONS`, exported once."""
    name = "-".join([Path(model).name, *(option.strip("-") for option in options)])
    folder = CACHE / "exported" / name
    if not (folder / "topw_manifest.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "topw_deploy", "export", str(model), str(folder), "--no-verify"]
        subprocess.run([*command, "--overwrite", *options], check=True, stdout=subprocess.DEVNULL)
    return folder

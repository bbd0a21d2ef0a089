"""The worker of `benchmarks.int4` and `benchmarks.loops` for llama.cpp: GGUF files, losses and steps.

Needs llama-cpp-python (tested with 0.3.36) and gguf, but nothing of this project. llama.cpp quantises float32 files
without an importance matrix.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml

UNCOUNTED = 2  # warm-up steps of a turn
_CONTEXT = 2048  # tokens
TYPES = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DISCARD_LOG = llama_cpp.llama_log_callback(lambda *_: None)  # a global, because llama.cpp keeps only its address
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def reorder_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows: llama.cpp rotates adjacent pairs of a head, Hugging Face's Llama rotates its two halves."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def write_gguf(weights: str, config: dict[str, Any], target: str, tokenizer: dict[str, Any] | None = None) -> None:
    """Write a float32 GGUF file.

    weights: path of a .npz file with the tensors by name.
    tokenizer: the content of a tokenizer.json with a byte-level BPE; None writes no vocabulary.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    rotary = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rotary.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")  # token ids in, logits out
    else:
        add_vocabulary(writer, tokenizer, config)
    with np.load(weights) as tensors:
        for name in tensors.files:
            weight = tensors[name].astype(np.float32)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = reorder_rotary_rows(weight, heads if "q_proj" in name else kv_heads)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the tokenizer. If `config` has no beginning or end of sequence, token 0 is used: llama.cpp needs an id."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {added["content"] for added in tokenizer["added_tokens"]}
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL for text in texts]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(pairs or [f"{texts[-1]} {texts[-1]}"])  # llama.cpp refuses an empty list
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_eos_token_id(config.get("eos_token_id") or 0)
    writer.add_add_bos_token("<|begin_of_text|>" in special)


def open_context(path: str, threads: int, **sizes: int) -> tuple[Any, int]:
    """Load a GGUF file. Returns a context, and the size of its vocabulary. sizes: parameters of the context."""
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
    if not model:
        raise OSError(f"llama.cpp cannot load {path}")
    given = llama_cpp.llama_context_default_params()
    for name, value in {**sizes, "n_threads": threads, "n_threads_batch": threads, "no_perf": True}.items():
        setattr(given, name, value)
    context = llama_cpp.llama_init_from_model(model, given)
    if not context:
        raise OSError(f"llama.cpp cannot make a context of {sizes}")
    return context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


class Model:
    """One context over one GGUF file."""

    def __init__(self, path: str, threads: int, length: int) -> None:
        sizes = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), max(length, 512))
        self.context, self.vocab = open_context(path, threads, **sizes)
        self.used = 0

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.used = 0

    def run(self, ids: list[int], *, every: bool) -> np.ndarray:
        """Append `ids` to the sequence. Returns the logits [n, vocab] of every id or of the last one."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, self.used + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = every or place == len(ids) - 1
        failed = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        self.used += len(ids)
        count = len(ids) if every else 1
        pointer = llama_cpp.llama_get_logits(self.context)
        floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(floats, shape=(count, self.vocab))


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: threads."""
    llama_cpp.llama_log_set(_DISCARD_LOG, ctypes.c_void_p())
    # Some builds, such as node-llama-cpp's, have their kernels in libraries of their own.
    libggml.ggml_backend_load_all_from_path(str(Path(llama_cpp.__file__).with_name("lib")).encode())
    llama_cpp.llama_backend_init()
    models: dict[str, Model] = {}
    threads = int(settings["threads"])

    def quantise(source: str, kind: str, target: str) -> int:
        """Quantise a float32 file to `kind`; returns its size."""
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.nthread = TYPES[kind], 2
        if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(how)):
            raise RuntimeError(f"llama.cpp cannot write {kind}")
        return Path(target).stat().st_size

    def write(weights: str, config: dict[str, Any], target: str, tokenizer: dict[str, Any] | None = None) -> int:
        write_gguf(weights, config, target, tokenizer)
        return Path(target).stat().st_size

    def open_(name: str, path: str, length: int) -> None:
        models[name] = Model(path, threads, length)

    def losses(name: str, rows: list[list[int]]) -> list[list[float]]:
        """-log p of each next token, by row."""
        model, found = models[name], []
        for row in rows:
            model.clear()
            logits = model.run(row[:-1], every=True).astype(np.float64)
            most = logits.max(axis=1)
            chosen = logits[np.arange(len(row) - 1), row[1:]]
            found.append((np.log(np.exp(logits - most[:, None]).sum(axis=1)) + most - chosen).tolist())
        return found

    def prefill(name: str, prompt: list[int], room: int) -> float:
        del room  # `open` states the length
        model = models[name]
        model.clear()
        began = time.perf_counter()
        model.run(prompt, every=False)
        return time.perf_counter() - began

    def turn(name: str, steps: int) -> float:
        """Median seconds of a greedy step, after UNCOUNTED others."""
        model, times, token = models[name], [], 5
        for number in range(steps + UNCOUNTED):
            began = time.perf_counter()
            token = int(model.run([token], every=False)[0].argmax())
            if number >= UNCOUNTED:
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def first_token(path: str, prompt: list[int]) -> float:
        """Seconds to open a model and to draw a token. The model stays open."""
        began = time.perf_counter()
        open_("first", path, _CONTEXT)
        models["first"].run(prompt, every=False)[0].argmax()
        return time.perf_counter() - began

    return {
        "write": write,
        "quantise": quantise,
        "open": open_,
        "losses": losses,
        "prefill": prefill,
        "turn": turn,
        "first_token": first_token,
    }

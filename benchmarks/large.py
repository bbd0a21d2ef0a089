"""Time and memory of exporting a model of several GB, by stage, against the dry run's predictions.

    python -m benchmarks.large [--billions 3] [--dtypes fp16 int4] [--folder DIR]

The model is a Llama with random float16 weights. Dry run and export are processes of their
own. DIR needs three times the checkpoint's size (18 GB for 3 billion parameters). Figures: docs/lab/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, say, table
from topw_deploy.tiny import tiny_model_path

_EXPORT = """
import dataclasses, json, sys
from topw_deploy.export import export_model
from topw_deploy.progress import Progress
progress = Progress(lambda line: print(line, file=sys.stderr, flush=True))
report = export_model(**json.loads(sys.argv[1]), progress=progress)
print(json.dumps({"seconds": report.seconds, "memory": report.memory, "sizes": report.sizes,
                  "status": report.verification.status, "notices": report.notices}))
"""
_SHARD = 1 << 30
_GIB = 2**30


def parameter_shapes(layers: int, hidden: int, inner: int, kv: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape, in file order."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        found |= {f"{start}self_attn.{name}_proj.weight": (kv if name in "kv" else hidden, hidden) for name in "qkvo"}
        found |= {f"{start}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found[f"{start}mlp.down_proj.weight"] = (hidden, inner)
        found |= {f"{start}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {**found, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_checkpoint(folder: Path, billions: float) -> int:
    """Write a Llama of about `billions` billion random float16 parameters, by shard; returns bytes."""
    from safetensors.numpy import save_file

    hidden, inner, kv, vocab = 3072, 8192, 1024, 32000
    per_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    layers = max(5, round((billions * 1e9 - 2 * vocab * hidden) / per_layer))
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    shard: dict[str, np.ndarray] = {}
    places: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in parameter_shapes(layers, hidden, inner, kv, vocab).items():
        if len(shape) == 1:
            shard[name] = np.ones(shape, np.float16)
        else:
            # Random signs and mantissas with one exponent: magnitudes in [2^-6, 2^-5), as fast as random integers.
            bits = generator.integers(0, 1 << 16, shape, dtype=np.uint16)
            shard[name] = ((bits & 0x83FF) | 0x2400).view(np.float16)
        total += shard[name].nbytes
        if sum(array.nbytes for array in shard.values()) > _SHARD:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": kv // 128, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tiny_model_path() / name).is_file():
            shutil.copy(tiny_model_path() / name, folder)
    return total


def run_child(code: str, *arguments: str) -> dict[str, Any]:
    """Run `code` in its own process; return the JSON it prints."""
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def run_export(model: Path, out: Path, **settings: Any) -> dict[str, Any]:
    say(f"{model.name} -> {out.name} {settings}")
    return run_child(_EXPORT, json.dumps({"model": str(model), "output": str(out), "verify": False, **settings}))


def stages_of(work: Path, billions: float, dtypes: list[str]) -> list[tuple[str, ...]]:
    """Table rows by stage: name, seconds, GiB of files, peak GiB, predicted GiB."""
    started = time.perf_counter()
    size = write_checkpoint(work / "model", billions)
    rows: list[tuple[str, ...]] = []
    rows.append(("checkpoint, float16", f"{time.perf_counter() - started:.0f}", f"{size / _GIB:.2f}", "", ""))

    def add(what: str, found: dict[str, Any], foreseen: dict[str, Any] | None = None) -> None:
        for stage, peak in found["memory"].items():
            before = (foreseen or {}).get("memory", {}).get(stage)
            first = stage == next(iter(found["memory"]))
            seconds = f"{found['seconds']:.0f}" if first else ""
            files = f"{sum(found['sizes'].values()) / _GIB:.3f}" if first and "sizes" in found else ""
            guess = f"{before / _GIB:.2f}" if before else ""
            rows.append((f"{what}: {stage}", seconds, files, f"{peak / _GIB:.2f}", guess))
            say("  " + "  ".join(rows[-1]))

    for dtype in dtypes:
        settings = {"dtype": dtype, "kv": "concat"} if dtype == "fp16" else {"dtype": dtype}
        dry = run_export(work / "model", work / "none", dry_run=True, **settings)
        add(f"{dtype} dry run", {**dry, "memory": {"graph": dry["memory"]["graph"]}})
        out = work / dtype
        done = run_export(work / "model", out, **settings)
        add(f"{dtype} export", done, dry)
        wrong = {name: n for name, n in dry["sizes"].items() if done["sizes"].get(name) != n}
        say(f"wrongly predicted sizes: {wrong or 'none'}")
        shutil.rmtree(out)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=3.0, help="parameters")
    parser.add_argument("--dtypes", nargs="+", default=["fp16", "int4"], choices=("fp16", "fp32", "int4", "int8"))
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="large-") as name:
        rows = stages_of(Path(name), args.billions, args.dtypes)
    print(f"{machine()}\n")
    print(table(("stage", "seconds", "files GiB", "peak GiB", "foreseen GiB"), rows))


if __name__ == "__main__":
    main()

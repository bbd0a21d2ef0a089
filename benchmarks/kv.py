"""Compare caches updated in place with onnxruntime-genai's on the same weights. Figures: docs/lab/results.md.

    python -m benchmarks.kv --model HF_FOLDER --genai FOLDER --genai-python PYTHON [--context 128 1024 4096]
        [--threads 1 2] [--dtype fp32]

FOLDER is written by genai's builder, in its own environment:

    python -m onnxruntime_genai.models.builder -i HF_FOLDER -o FOLDER -p fp32 -e cpu

Without --model, uses a random 52 M parameter Llama; without --genai, only our forms. --kind makes both folders, for a
random model of about 50 M parameters with convolutions, windows, sinks and experts, or gated delta rules:

    python -m benchmarks.kv --kind lfm2 gpt_oss gemma3 qwen3_5 --genai-python PYTHON --form static
        --context 128 1024 [--dtype fp32]

Decoders with ArgMax instead of the sampler take turns of a few steps in one process; tables have median ratios per turn
with 95 % intervals. `topw bench decode OUT --genai FOLDER` measures the whole loops.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from benchmarks.common import machine, say, table
from benchmarks.kinds import KINDS, genai_folder, kind_model
from benchmarks.loops import Times, extend, format_ratios, measure_loops, open_graphs
from benchmarks.models import export_once, llama_50m
from topw_deploy.manifest import load_manifest

FORMS = {
    "static": ("--kv", "static"),
    "scatter": ("--kv", "static", "--target", "tensorrt", "--max-length", "0", "--opset", "24"),
    "concat": ("--kv", "concat"),
}

# As genai's builder quantises by default, so that the products are equal.
AS_GENAI = {"int4": ("--calibration", "none", "--symmetric", "--block-size", "32", "--table-bits", "4")}


def print_tables(folders: dict[str, Path], vocab: int, args: argparse.Namespace) -> None:
    """Tables of steps and of prompts, relative to genai, else to the first form."""
    rng = np.random.default_rng(args.seed)
    base = "genai" if "genai" in folders else next(iter(folders))
    others = [name for name in folders if name != base]
    steps: list[tuple[object, ...]] = []
    prompts: list[tuple[object, ...]] = []
    for threads in args.threads:
        for context in args.context:
            say(f"{context} tokens of context, {threads} threads")
            prompt_times, step_times = measure(folders, vocab, threads, context, rng, args)
            for rows, times in ((steps, step_times), (prompts, prompt_times)):
                median = f"{statistics.median(times[base]) * 1e3:.2f}"
                ratios = (format_ratios(times[name], times[base]) for name in others)
                rows.append((threads, f"{context:,}", median, *ratios))
    header = ("threads", "context", f"{base} ms", *(f"{name} / {base}" for name in others))
    print(f"\nA step\n\n{table(header, steps)}\n\nThe prompt\n\n{table(header, prompts)}", flush=True)


def measure(
    folders: dict[str, Path], vocab: int, threads: int, context: int, rng: np.random.Generator, args: argparse.Namespace
) -> tuple[Times, Times]:
    """Seconds of prompts and of steps, over all sessions and sequences."""
    prompts: Times = {}
    steps: Times = {}
    for _ in range(args.sessions):
        order = [list(folders)[place] for place in rng.permutation(len(folders))]
        with open_graphs({name: folders[name] for name in order}, threads) as workers:
            for _ in range(args.sweeps):
                prompt, seed = rng.integers(2, vocab, context), int(rng.integers(1 << 31))
                times = measure_loops(workers, prompt.tolist(), turns=args.turns, steps=args.steps, seed=seed)
                extend(prompts, times[0])
                extend(steps, times[1])
                if len(set(workers[order[0]].call("first").values())) > 1:
                    say("  the graphs do not agree on the first token")
    return prompts, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: a random model)")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), help="random models with other states")
    parser.add_argument("--genai", type=Path, help="the folder that genai's builder made of the same model")
    parser.add_argument("--genai-python", type=Path, help="interpreter of its environment (default: this one)")
    parser.add_argument("--dtype", default="fp32", help="type of our exports")
    parser.add_argument("--form", nargs="+", default=["static", "scatter"], choices=list(FORMS))
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sessions", type=int, default=3, help="processes")
    parser.add_argument("--sweeps", type=int, default=2, help="sequences per session")
    parser.add_argument("--turns", type=int, default=12, help="turns of each graph per sequence")
    parser.add_argument("--steps", type=int, default=6, help="counted steps per turn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.kind:
        print_comparison(args.model or llama_50m(), args)
    for kind in args.kind or ():
        model = kind_model(kind)
        if args.genai_python is not None:
            args.genai = genai_folder(model, args.dtype, args.genai_python)
        print_comparison(model, args)


def print_comparison(model: Path, args: argparse.Namespace) -> None:
    """Print the tables of one model."""
    options = ("--dtype", args.dtype, *AS_GENAI.get(args.dtype, ()))
    folders = {name: export_once(model, *options, *FORMS[name]) for name in args.form}
    vocab = load_manifest(next(iter(folders.values()))).sampler.vocab_size
    print(f"\n{machine()}; {model}, {args.dtype}")
    print_tables(folders if args.genai is None else {**folders, "genai": args.genai}, vocab, args)


if __name__ == "__main__":
    main()

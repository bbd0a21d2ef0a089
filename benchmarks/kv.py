"""Compare caches updated in place with onnxruntime-genai's on the same weights. Figures: docs/lab/results.md.

    python -m benchmarks.kv --model HF_FOLDER --genai FOLDER --genai-python PYTHON [--context 128 1024 4096]
        [--threads 1 2] [--dtype fp32]

FOLDER is written by genai's builder, in its own environment:

    python -m onnxruntime_genai.models.builder -i HF_FOLDER -o FOLDER -p fp32 -e cpu

Without --model, uses a random 52 M parameter Llama; without --genai, only our forms. --kind makes both folders, for a
random model of about 50 M parameters with convolutions, windows, sinks and experts, or gated delta rules:

    python -m benchmarks.kv --kind lfm2 gpt_oss gemma3 qwen3_5 --genai-python PYTHON --form static
        --context 128 1024 [--dtype fp32]

Decoders with ArgMax instead of the sampler take turns of a few steps in one process; ratios per turn.
`topw bench decode OUT --genai FOLDER` measures the whole loops.

Tables have medians with 95 % intervals.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import add_repository_to_pythonpath, machine, say, table
from benchmarks.kinds import KINDS, genai_folder, kind_model
from benchmarks.models import export_once, llama_50m
from topw_deploy.manifest import DecoderInfo, load_decoder_manifest, load_manifest
from topw_lab.bench.measure import median_interval
from topw_lab.worker import Worker

WORKER = Path(__file__).with_name("kv_worker.py")
FORMS = {
    "static": ("--kv", "static"),
    "scatter": ("--kv", "static", "--target", "tensorrt", "--max-length", "0", "--opset", "24"),
    "concat": ("--kv", "concat"),
}

# As genai's builder quantises by default, so that the products are equal.
AS_GENAI = {"int4": ("--symmetric", "--block-size", "32", "--table-bits", "4")}


def format_ratios(ratios: Sequence[float]) -> str:
    """0.981 (0.975-0.988)"""
    low, high = median_interval(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})"


def print_graph_tables(ours: dict[str, Path], args: argparse.Namespace) -> None:
    """Tables of steps and of prefills."""
    rng = np.random.default_rng(args.seed)
    steps, prefills, memories = [], [], []
    decoder = load_decoder_manifest(next(iter(ours.values()))).decoder
    for threads in args.threads:
        measured = []
        for context in args.context:
            say(f"graphs: {context} tokens of context, {threads} threads")
            sweeps = [
                sweep
                for number in range(args.sessions)
                for sweep in _run_session(ours, threads, context, number, rng, args)
            ]
            measured.append(sweeps[0])
            turns = [turn for sweep in sweeps for turn in sweep["turns"]]
            differing = sum(len(set(sweep["first"].values())) > 1 for sweep in sweeps)
            if differing:
                say(f"  the graphs do not agree on the first token of {differing} in {len(sweeps)} sequences")
            steps.append((threads, f"{context:,}", *_ratio_cells(turns, args)))
            prefills.append((threads, f"{context:,}", *_ratio_cells([sweep["prefill"] for sweep in sweeps], args)))
        if threads == args.threads[0]:
            memories = [_memory_row(by_context, decoder, args) for by_context in measured]
    names = [name for name in args.form if name != args.yardstick]
    header = ("threads", "context", f"{args.yardstick} ms", *(f"{name} / {args.yardstick}" for name in names))
    print(f"\nA step of the bare graph\n\n{table(header, steps)}\n\nPrefill\n\n{table(header, prefills)}")
    print(f"\nStates, KiB\n\n{table(('tokens', 'by the formula', *args.form, *_peer_names(args)), memories)}")


def _peer_names(args: argparse.Namespace) -> list[str]:
    return ["genai"] if args.genai is not None else []


def _memory_row(sweep: dict[str, Any], decoder: DecoderInfo, args: argparse.Namespace) -> list[str]:
    """Memory of the states of one row with room for the sweep's tokens."""
    formula = sum(state.row_bytes(sweep["room"]) for state in decoder.states)
    sizes = [formula, *(sweep["bytes"][name] for name in (*args.form, *_peer_names(args)))]
    return [f"{sweep['room']:,}", *(f"{size / 1024:,.1f}" for size in sizes)]


def _run_session(
    ours: dict[str, Path], threads: int, context: int, number: int, rng: np.random.Generator, args: argparse.Namespace
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=next(iter(ours.values())).parent, prefix=".kv-") as scratch:
        settings = {
            "task": "sweeps",
            "scratch": scratch,
            "ours": {name: str(folder) for name, folder in ours.items()},
            "genai": None if args.genai is None else str(args.genai.absolute()),
            "threads": threads,
            "seed": args.seed + number,
        }
        with Worker("the graphs", WORKER, settings, threads=threads) as worker:
            prompts = [[int(token) for token in rng.integers(2, args.vocab, context)] for _ in range(args.sweeps)]
            return [worker.call("sweep", prompt=prompt, turns=args.turns, steps=args.steps) for prompt in prompts]


def _ratio_cells(turns: Sequence[dict[str, float]], args: argparse.Namespace) -> list[str]:
    names = [name for name in args.form if name != args.yardstick]
    base = statistics.median(turn[args.yardstick] for turn in turns) * 1e3
    return [f"{base:.2f}", *(format_ratios([turn[name] / turn[args.yardstick] for turn in turns]) for name in names)]


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
    add_repository_to_pythonpath()
    if not args.kind:
        print_comparison(args.model or llama_50m(), args)
    for kind in args.kind or ():
        model = kind_model(kind)
        if args.genai_python is not None:
            args.genai = genai_folder(model, args.dtype, args.genai_python)
        print_comparison(model, args)


def print_comparison(model: Path, args: argparse.Namespace) -> None:
    """Print the tables of one model."""
    ours = {
        name: export_once(model, "--dtype", args.dtype, *AS_GENAI.get(args.dtype, ()), *FORMS[name])
        for name in args.form
    }
    args.vocab = load_manifest(next(iter(ours.values()))).sampler.vocab_size
    args.yardstick = "genai" if args.genai is not None else args.form[0]
    print(f"\n{machine()}; {model}, {args.dtype}")
    print_graph_tables(ours, args)


if __name__ == "__main__":
    main()

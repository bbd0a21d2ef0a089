"""Time of a prompt and of a step with a mixture of experts. Figures: docs/lab/results.md.

    python -m benchmarks.experts [--tokens 1024] [--threads 2] [--rounds 3]

Uses a random Mixtral of 54 M parameters, whose forms take turns in one process and end in ArgMax instead of the
sampler.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.common import machine, table
from benchmarks.loops import HEADER, cells, measure_loops, open_graphs
from benchmarks.models import export_once, mixtral_50m

FORMS = {
    "MoE, float32": (),
    "QMoE, int4": ("--dtype", "int4"),
    "QMoE, int8": ("--dtype", "int8"),
    "blocks, float32": ("--target", "tensorrt", "--max-length", "0", "--opset", "24"),
}
VOCAB, STEPS = 32_000, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    exports = {name: export_once(mixtral_50m(), *options) for name, options in FORMS.items()}
    prompt = np.random.default_rng(0).integers(2, VOCAB, args.tokens).tolist()
    with open_graphs(exports, args.threads) as workers:
        times = measure_loops(workers, prompt, prompts=args.rounds, turns=args.rounds, steps=STEPS, seed=0)
    rows = [(name, *cells(times[0][name], times[1][name])) for name in exports]
    print(f"{machine()}; {args.tokens:,} tokens, {args.threads} threads, {args.rounds} rounds\n")
    print(table(("experts", *HEADER), rows))


if __name__ == "__main__":
    main()

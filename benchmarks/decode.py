"""The decoding loop: `TopWModel` beside a bare IO-binding loop over the same decoder, ArgMax in the sampler's place.

    python -m benchmarks.decode [--vocab 32000 151936] [--threads 1 2] [--prompt 16] [--tokens 128] [--rounds 9]

Both sides decode the same number of tokens after the same random prompt; what is timed is the decode steps, the
prompt's own pass left out on both sides. A ratio of 1.05 means that Top-W and this package's Python cost 5 % of a step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from benchmarks.bare_loop import BareLoop, with_argmax
from benchmarks.common import interleave, machine, ratio, say, table
from benchmarks.models import exported, llama_50m
from topw_deploy.runtime import TopWModel


def measure(folder: Path, threads: int, prompt: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per token of each side, one value a round."""
    bare = BareLoop(with_argmax(folder), threads)
    model = TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=threads)
    ids = np.random.default_rng(0).integers(1, 30_000, prompt)
    steps = tokens - 1
    certified: list[float] = []

    def run_bare() -> float:
        return bare.run(ids[None], tokens)[1] / steps * 1e3

    def run_topw() -> float:
        result = model.generate(ids.tolist(), max_new_tokens=tokens, seed=1, ignore_eos=True)
        certified.append(result.certified_share)
        return result.timings.seconds_per_token * 1e3

    samples = interleave({"bare": run_bare, "topw": run_topw}, rounds)
    say(f"  certified share {min(certified):.3f}")
    model.close()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tail", default="portable", choices=("portable", "onnxruntime", "static"))
    parser.add_argument("--json", action="store_true", help="the samples instead of the table")
    args = parser.parse_args()
    rows, everything = [], {}
    for vocab in args.vocab:
        folder = exported(llama_50m(vocab), "--tail", args.tail)
        for threads in args.threads:
            say(f"vocabulary {vocab}, {threads} threads")
            samples = measure(folder, threads, args.prompt, args.tokens, args.rounds)
            everything[f"{vocab}/{threads}"] = samples
            share = ratio(samples, "topw", "bare")
            bare, topw = (np.median(samples[side]) for side in ("bare", "topw"))
            rows.append((f"{vocab:,}", threads, f"{bare:.2f}", f"{topw:.2f}", share.format(digits=3)))
    if args.json:
        print(json.dumps(everything))
        return
    print(f"{machine()}; {args.prompt} + {args.tokens} tokens, tail {args.tail}, {args.rounds} rounds\n")
    print(table(("vocabulary", "threads", "bare ms/token", "TopWModel ms/token", "ratio (quartiles)"), rows))


if __name__ == "__main__":
    main()

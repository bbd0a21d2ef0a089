"""`TopWModel` against transformers' `generate`, with and without the authors' processor.

    python -m benchmarks.transformers_generate --processor FILE [--vocab 32000] [--threads 2]

FILE is logit_processor_w1.py of arashgholami/top-w-decoding. Times whole calls of equal length. Figures:
docs/lab/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.common import interleave, machine, ratio, released_processor, table
from benchmarks.models import export_once, llama_50m
from topw_deploy.runtime import TopWModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", type=Path, required=True, metavar="FILE")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = llama_50m(args.vocab)
    ours = TopWModel.from_pretrained(
        export_once(source, "--preset", "released"), provider="cpu", intra_op_num_threads=args.threads
    )
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    # top_k=0: the default keeps only the 50 best tokens.
    theirs.generation_config = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None, max_new_tokens=args.tokens
    )
    released = released_processor(args.processor)(theirs.get_input_embeddings().weight)
    ids = np.random.default_rng(0).integers(1, 30_000, args.prompt)
    prompt = torch.from_numpy(ids)[None]

    def run_ours() -> float:
        started = time.perf_counter()
        ours.generate(ids.tolist(), max_new_tokens=args.tokens, seed=1, ignore_eos=True)
        return (time.perf_counter() - started) / args.tokens * 1e3

    def run_theirs(processors: list[object]) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), logits_processor=processors)
        assert out.shape[1] == args.prompt + args.tokens
        return (time.perf_counter() - started) / args.tokens * 1e3

    names = ("topw_deploy", "transformers + authors' processor", "transformers, plain sampling")
    sides = (run_ours, lambda: run_theirs([released]), lambda: run_theirs([]))
    samples = interleave(dict(zip(names, sides, strict=True)), args.rounds)
    print(
        f"{machine()}; vocabulary {args.vocab:,}, {args.threads} threads, {args.tokens} tokens, {args.rounds} rounds\n"
    )
    rows = [(n, f"{np.median(samples[n]):.2f}", ratio(samples, n, names[0]).format(digits=2)) for n in names]
    print(table(("side", "ms/token", "times ours (quartiles)"), rows))


if __name__ == "__main__":
    main()

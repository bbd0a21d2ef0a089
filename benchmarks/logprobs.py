"""What log-probabilities cost: python -m benchmarks.logprobs OUT (a folder exported with --with-logits).

Prints the time of one score over 151,936 logits; for a prompt, ms per token of reading it in chunks, token by token
with prompt_logprobs, and with 8 such requests in an engine; and ms per drawn token without and with logprobs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.logprobs import score_token

VOCAB, ROUNDS = 151_936, 5


def best_of(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the prompt, and drawn tokens")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    logits = (np.random.default_rng(0).standard_normal(VOCAB) * 4).astype(np.float32)
    for count in (0, 1, 5, 20):
        seconds = best_of(partial(score_token, logits, 7, count), 50)
        print(f"score, {VOCAB:,} logits, {count:2} best: {seconds * 1e3:.3f} ms")
    model = TopWModel.from_pretrained(given.folder, provider="cpu", intra_op_num_threads=given.threads)
    prompt = np.random.default_rng(1).integers(5, model.manifest.sampler.vocab_size, given.tokens).tolist()

    def read(**settings: int) -> float:
        return best_of(lambda: model.generate(prompt, seed=1, **settings)) / given.tokens * 1e3

    with Engine(model, max_batch=8) as engine:

        def read_eight() -> None:
            requests = [engine.submit(prompt, max_new_tokens=0, prompt_logprobs=0) for _ in range(8)]
            for request in requests:
                request.result()

        print(f"prompt, in chunks: {read(max_new_tokens=1):.3f} ms per token")
        print(f"prompt, prompt_logprobs=0: {read(max_new_tokens=0, prompt_logprobs=0):.3f}")
        print(f"8 prompts, prompt_logprobs=0, in an engine: {best_of(read_eight) / given.tokens / 8 * 1e3:.3f}")

    def draw(**settings: int) -> float:
        return best_of(
            lambda: model.generate(prompt[:1], seed=1, max_new_tokens=given.tokens, ignore_eos=True, **settings)
        ) / given.tokens * 1e3  # fmt: skip

    print(f"drawn: {draw():.3f} ms per token; logprobs=0: {draw(logprobs=0):.3f}; logprobs=5: {draw(logprobs=5):.3f}")


if __name__ == "__main__":
    main()

"""The worker for `TopWModel` and for ArgMax.

Functions import what they need, so that load times include imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[int], int], dict[str, float]]


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder, variant ("native", "graph" or "argmax"), threads, argmax (the ArgMax file)."""
    began = time.perf_counter()
    run = (_argmax if settings["variant"] == "argmax" else _topw)(settings)
    took = time.perf_counter() - began
    return {"run": run, "load_seconds": lambda: took}


def _topw(settings: dict[str, Any]) -> Run:
    from topw_deploy.runtime import TopWModel

    model = TopWModel.from_pretrained(
        settings["folder"],
        provider="cpu",
        sampler=settings["variant"],
        intra_op_num_threads=settings["threads"],
    )

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        result = model.generate(prompt, max_new_tokens=new_tokens, seed=1, ignore_eos=True)
        took = time.perf_counter() - started
        rest = result.timings.decode_seconds
        return {
            "first": took - rest,
            "rest": rest,
            "tokens": len(result.token_ids),
            "certified": result.certified_share,
        }

    return run


def _argmax(settings: dict[str, Any]) -> Run:
    import onnxruntime as ort

    from topw_deploy.bench.decode.argmax import ArgMaxLoop
    from topw_deploy.manifest import load_decoder_manifest

    decoder = load_decoder_manifest(settings["folder"]).decoder
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    options.log_severity_level = 3
    loop = ArgMaxLoop(Path(settings["argmax"]), decoder, options)

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        loop.prefill(prompt, len(prompt) + new_tokens)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            loop.step()
        return {"first": first - started, "rest": time.perf_counter() - first, "tokens": new_tokens}

    return run

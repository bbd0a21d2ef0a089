"""The worker of `topw bench decode` for `TopWModel` and for ArgMax.

Functions import what they need, so that the load time includes imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

Run = Callable[[list[int], int], dict[str, float]]


class LoopSettings(TypedDict, total=False):
    """Settings of the worker.

    folder: the exported model.
    variant: "native" or "graph", a sampler of `TopWModel`; or "argmax".
    threads: number of threads of the session.
    argmax: the model of `write_argmax_model`, for the variant "argmax".
    """

    folder: str
    variant: str
    threads: int
    argmax: str


def start(settings: LoopSettings) -> dict[str, Callable[..., Any]]:
    """Load the model. Returns the functions `run` (generates once, see `LoopResult.runs`) and `load_seconds`."""
    began = time.perf_counter()
    run = (_load_argmax if settings["variant"] == "argmax" else _load_topw)(settings)
    load_seconds = time.perf_counter() - began
    return {"run": run, "load_seconds": lambda: load_seconds}


def _load_topw(settings: LoopSettings) -> Run:
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
        seconds = time.perf_counter() - started
        rest = result.timings.decode_seconds
        return {
            "first": seconds - rest,
            "rest": rest,
            "tokens": len(result.token_ids),
            "certified": result.certified_share,
        }

    return run


def _load_argmax(settings: LoopSettings) -> Run:
    import onnxruntime as ort

    from topw_deploy.manifest import load_decoder_manifest
    from topw_lab.bench.decode.argmax import ArgMaxLoop

    decoder = load_decoder_manifest(settings["folder"]).decoder
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    options.log_severity_level = 3
    loop = ArgMaxLoop(Path(settings["argmax"]), decoder, options)

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        sequence = loop.prefill(prompt, len(prompt) + new_tokens)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            sequence.step()
        return {"first": first - started, "rest": time.perf_counter() - first, "tokens": new_tokens}

    return run

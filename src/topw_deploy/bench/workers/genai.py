"""onnxruntime-genai's samplers and decoding loop. This file does not import topw_deploy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]

_BURST, _MOST_CALLS = 2e-3, 100  # seconds per sample; maximum calls


class Sampler:
    """A generator that draws repeatedly from the same logits [B, V].

    A generator accepts logits only after it has computed some, so each draw first rewinds it and runs an empty model.
    Only `generate_next_token` is timed.
    """

    def __init__(self, model: Any, logits: np.ndarray, options: dict[str, Any]) -> None:
        batch, vocab = logits.shape
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=16, batch_size=batch, random_seed=1, **options)
        self._generator = og.Generator(model, params)
        self._logits = np.ascontiguousarray(logits).reshape(batch, 1, vocab)
        self._prompt = np.zeros((batch, 1), np.int32)
        self.tokens: list[int] = []
        self.draw()
        self.calls = max(1, min(_MOST_CALLS, round(_BURST / max(self.draw(), 1e-9))))

    def draw(self) -> float:
        """Draw one token per row into `tokens`; returns the seconds."""
        self._generator.rewind_to(0)
        self._generator.append_tokens(self._prompt)
        self._generator.set_logits(self._logits)
        started = time.perf_counter()
        self._generator.generate_next_token()
        took = time.perf_counter() - started
        self.tokens = [int(token) for token in self._generator.get_next_tokens()]
        return took


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings["task"]: "sample" (`start_sampling`) or "decode" (`start_decoding`)."""
    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
    return {"sample": start_sampling, "decode": start_decoding}[settings["task"]](settings)


def start_sampling(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: model (a folder), sides (name -> search options), logits (a .npy file per case), temperatures."""
    model = og.Model(settings["model"])
    logits = [np.load(Path(path)) for path in settings["logits"]]
    samplers: dict[tuple[str, int], Sampler] = {}

    def sampler(side: str, case: int) -> Sampler:
        if (side, case) not in samplers:
            options = dict(settings["sides"][side])
            if options["do_sample"]:
                options["temperature"] = settings["temperatures"][case]
            samplers[side, case] = Sampler(model, logits[case], options)
        return samplers[side, case]

    def timed(side: str, case: int) -> float:
        chosen = sampler(side, case)
        return sum(chosen.draw() for _ in range(chosen.calls)) / chosen.calls

    def tokens(side: str, case: int) -> list[int]:
        chosen = sampler(side, case)
        chosen.draw()
        return chosen.tokens

    return {"time": timed, "tokens": tokens, "version": lambda: og.__version__}


def start_decoding(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder (from genai's builder), search (genai's search options), threads."""
    began = time.perf_counter()
    config = og.Config(settings["folder"])
    session = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)
    took = time.perf_counter() - began

    def run(prompt: list[int], new_tokens: int) -> dict[str, float]:
        started = time.perf_counter()
        params = og.GeneratorParams(model)
        params.set_search_options(
            max_length=len(prompt) + new_tokens, batch_size=1, random_seed=1, **settings["search"]
        )
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([prompt], np.int32))
        generator.generate_next_token()
        tokens = [int(generator.get_next_tokens()[0])]
        first = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return {"first": first - started, "rest": time.perf_counter() - first, "tokens": len(tokens)}

    return {"run": run, "load_seconds": lambda: took}

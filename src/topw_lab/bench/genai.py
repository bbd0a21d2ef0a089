"""The worker for onnxruntime-genai's samplers and decoding loop. It does not import topw_deploy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]

_SAMPLE_SECONDS, _MOST_CALLS = 2e-3, 100  # a sample has as many calls as take this long, at most so many


class GenaiSampler:
    """A generator that draws repeatedly from the same logits [B, V].

    A generator accepts logits only after it has computed some. So each draw first rewinds the generator and runs a
    model without weights. Only `generate_next_token` is timed.

    options: search options of onnxruntime-genai.
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
        self.calls = max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS / max(self.draw(), 1e-9))))

    def draw(self) -> float:
        """Draw one token per row into `tokens`. Returns the seconds."""
        self._generator.rewind_to(0)
        self._generator.append_tokens(self._prompt)
        self._generator.set_logits(self._logits)
        started = time.perf_counter()
        self._generator.generate_next_token()
        seconds = time.perf_counter() - started
        self.tokens = [int(token) for token in self._generator.get_next_tokens()]
        return seconds


def start(settings: Any) -> dict[str, Callable[..., Any]]:
    """Start the task of the settings: "sample" or "decode"."""
    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
    return {"sample": start_sampling, "decode": start_decoding}[settings["task"]](settings)


def start_sampling(settings: Any) -> dict[str, Callable[..., Any]]:
    """Load the model. Returns `time` (seconds per step), `tokens` (of one draw) and `version`.

    settings: "folder" (with the model in genai/, and the logits [B, V] of each case in logits-0.npy and so on), "sides"
        (name of each side -> search options), and "temperatures" of the cases.
    """
    folder = Path(settings["folder"])
    model = og.Model(str(folder / "genai"))
    logits = [np.load(folder / f"logits-{index}.npy") for index in range(len(settings["temperatures"]))]
    samplers: dict[tuple[str, int], GenaiSampler] = {}

    def sampler(side: str, case: int) -> GenaiSampler:
        if (side, case) not in samplers:
            options = dict(settings["sides"][side])
            if options["do_sample"]:
                options["temperature"] = settings["temperatures"][case]
            samplers[side, case] = GenaiSampler(model, logits[case], options)
        return samplers[side, case]

    def time_step(side: str, case: int) -> float:
        drawing = sampler(side, case)
        return sum(drawing.draw() for _ in range(drawing.calls)) / drawing.calls

    def tokens(side: str, case: int) -> list[int]:
        drawing = sampler(side, case)
        drawing.draw()
        return drawing.tokens

    return {"time": time_step, "tokens": tokens, "version": lambda: og.__version__}


def start_decoding(settings: Any) -> dict[str, Callable[..., Any]]:
    """Load the model. Returns `run`, which generates once; see `decode.start`.

    settings: "folder" (a model that genai's builder wrote), "search" options, and "threads" of the session.
    """
    config = og.Config(settings["folder"])
    session = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)

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

    return {"run": run}

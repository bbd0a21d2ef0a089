"""onnxruntime-genai's own loop over a folder that its builder wrote (imports nothing of this project)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder, search (options of genai's search), threads."""
    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
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

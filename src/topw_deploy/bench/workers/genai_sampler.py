"""onnxruntime-genai's samplers over given logits (runs where onnxruntime-genai is; imports nothing of this project).

A generator takes logits only right after it computed some, so before every draw it is rewound and a model that does
nothing (bench/sampler/genai_model.py) is run; only `generate_next_token` is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og  # type: ignore[import-not-found]

_BURST, _MOST_CALLS = 2e-3, 100  # seconds of one sample; calls in it


class Draws:
    """One generator, drawing from the same logits [B, V] again and again."""

    def __init__(self, model: Any, logits: np.ndarray, options: dict[str, Any]) -> None:
        batch, vocab = logits.shape
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=16, batch_size=batch, random_seed=1, **options)
        self._generator = og.Generator(model, params)
        self._logits = np.ascontiguousarray(logits).reshape(batch, 1, vocab)
        self._prompt = np.zeros((batch, 1), np.int32)
        self.tokens: list[int] = []
        self.once()
        self.calls = max(1, min(_MOST_CALLS, round(_BURST / max(self.once(), 1e-9))))

    def once(self) -> float:
        """Seconds of one draw for every row; the tokens are in `tokens`."""
        self._generator.rewind_to(0)
        self._generator.append_tokens(self._prompt)
        self._generator.set_logits(self._logits)
        started = time.perf_counter()
        self._generator.generate_next_token()
        took = time.perf_counter() - started
        self.tokens = [int(token) for token in self._generator.get_next_tokens()]
        return took


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: model, a folder; sides, name -> search options; logits, for each case a .npy file; temperatures."""
    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
    model = og.Model(settings["model"])
    logits = [np.load(Path(path)) for path in settings["logits"]]
    draws: dict[tuple[str, int], Draws] = {}

    def drawing(side: str, case: int) -> Draws:
        if (side, case) not in draws:
            options = dict(settings["sides"][side])
            if options["do_sample"]:
                options["temperature"] = settings["temperatures"][case]
            draws[side, case] = Draws(model, logits[case], options)
        return draws[side, case]

    def timed(side: str, case: int) -> float:
        drawn = drawing(side, case)
        return sum(drawn.once() for _ in range(drawn.calls)) / drawn.calls

    def tokens(side: str, case: int) -> list[int]:
        drawn = drawing(side, case)
        drawn.once()
        return drawn.tokens

    return {"time": timed, "tokens": tokens, "version": lambda: og.__version__}

"""The worker of `benchmarks.serve` for onnxruntime-genai's Engine, greedy. Imports nothing of this project.

On a CPU that engine (0.18) forms static batches of at most four requests, and starts the next batch when all of them
have ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime_genai as og

_EVENTS = 64  # per call of `run`


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: folder (from genai's builder), threads."""
    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
    config = og.Config(settings["folder"])
    session = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    engine = og.Engine(og.Model(config))
    return {"serve": lambda requests, callers: serve(engine, requests, callers)}


def submit(engine: Any, prompt: list[int], new_tokens: int) -> Any:
    options = og.RequestOptions()
    options.set_max_session_tokens(len(prompt) + new_tokens)
    request = engine.create_request(options=options)
    turn = og.TurnOptions(request)
    turn.set_do_sample(False)
    turn.set_max_generated_tokens(new_tokens)
    turn.set_min_generated_tokens(new_tokens)
    request.begin_turn(np.array(prompt, np.int32), turn)
    return request


def serve(engine: Any, requests: list[tuple[list[int], int]], callers: int) -> dict[str, Any]:
    """Serve all requests, `callers` at a time. Returns what topw_lab/bench/serve.py describes.

    Every token counts as a text.
    """
    first: list[float] = []
    between: list[float] = []
    latest: dict[Any, float] = {}  # when a request was sent, or got its latest token
    begun: set[Any] = set()
    events, coming = engine.create_event_buffer(_EVENTS), iter(requests)

    def send() -> None:
        asked, following = time.perf_counter(), next(coming, None)
        if following is not None:
            latest[submit(engine, *following)] = asked

    began = time.perf_counter()
    for _ in range(callers):
        send()
    while engine.has_pending_requests():
        found = engine.run(events)
        now = time.perf_counter()
        for index in range(len(found)):
            event = found[index]
            request = event.request
            (between if request in begun else first).append(now - latest[request])
            begun.add(request)
            latest[request] = now
            if event.error_code != og.EngineErrorCode.NONE:
                raise RuntimeError(f"the engine answers {event.error_code}")
            if event.finish_reason != og.FinishReason.NONE:
                del latest[request]
                send()
    wanted = sum(new_tokens for _, new_tokens in requests)
    if len(first) + len(between) != wanted:
        raise RuntimeError(f"the engine drew {len(first) + len(between)} tokens instead of {wanted}")
    return {"seconds": time.perf_counter() - began, "first": first, "between": between}

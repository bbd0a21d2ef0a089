"""The worker of `benchmarks.int4` for exports: bare greedy loops over their graphs, each step timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort

from benchmarks.kv_ways import UNCOUNTED, bare_export
from topw_deploy.bench.decode.argmax import ArgMaxLoop


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: scratch (a folder on the exports' file system), threads."""
    ort.set_global_thread_pool_sizes(settings["threads"], 1)  # one pool: no session's threads spin beside another's
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    loops: dict[str, ArgMaxLoop] = {}

    def open_(name: str, path: str, length: int) -> None:
        del length  # the cache is made for each prompt
        folder = Path(settings["scratch"]) / name.replace(" ", "-")
        folder.mkdir()
        loops[name] = ArgMaxLoop(*bare_export(Path(path), folder), options)

    def prefill(name: str, prompt: list[int], room: int) -> float:
        began = time.perf_counter()
        loops[name].prefill(prompt, len(prompt) + room)
        return time.perf_counter() - began

    def turn(name: str, steps: int) -> list[float]:
        times = []
        for number in range(steps + UNCOUNTED):
            began = time.perf_counter()
            loops[name].step()
            if number >= UNCOUNTED:
                times.append(time.perf_counter() - began)
        return times

    return {"open": open_, "prefill": prefill, "turn": turn}

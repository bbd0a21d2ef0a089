"""The worker of `benchmarks.kv --part memory`: sequences of a small model, and the memory that they take."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import exported, llama_small
from topw_deploy.runtime import TopWModel

PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL = 0.01  # seconds between two looks


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak_during(work: Callable[[], object]) -> int:
    """Most bytes in memory that were seen while `work` ran."""
    seen, done = [resident()], threading.Event()

    def look() -> None:
        while not done.wait(INTERVAL):
            seen.append(resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(*seen, resident())


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: form (options of topw-export), tokens (of the longest sequence)."""
    tokens = settings["tokens"]
    folder = exported(llama_small(tokens + 64), *settings["form"])
    model = TopWModel.from_pretrained(folder, provider="cpu", max_length=tokens + 64, intra_op_num_threads=1)

    def generate(count: int) -> None:
        result = model.generate([1, 2, 3], max_new_tokens=count, seed=1, ignore_eos=True)
        assert len(result.token_ids) == count

    def grow() -> dict[str, int]:
        """Growth of the peak over what was there after a short sequence, for a tenth, a half and all of the tokens."""
        generate(tokens // 100)
        before = resident()
        parts = {"tenth": tokens // 10, "half": tokens // 2, "whole": tokens}
        found = {name: peak_during(lambda count=count: generate(count)) - before for name, count in parts.items()}
        return {"cache": model.cache_bytes, **found}

    return {"grow": grow}

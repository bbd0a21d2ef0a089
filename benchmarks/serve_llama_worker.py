"""The worker of `benchmarks.serve` for llama.cpp, greedy, through llama-cpp-python's low-level functions.

The high-level API serves one sequence at a time. Here each `llama_decode` gets the next token of every decoding
sequence and then prompt tokens up to `n_batch`, which is how llama.cpp's own server batches. Imports nothing of this
project but llama_cpp_worker.py.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.llama_cpp_worker import open_context
from benchmarks.llama_cpp_worker import start as start_files

_BATCH, _UBATCH = 2048, 512  # tokens of a batch, and of a run of the graph: the server's defaults


@dataclass
class ServedSequence:
    """One request.

    left: tokens still to draw.
    asked: time of the request.
    read: number of prompt tokens in the cache.
    length: number of tokens in the cache.
    token: the last drawn token.
    times: when each token was drawn.
    """

    prompt: list[int]
    left: int
    asked: float
    read: int = 0
    length: int = 0
    token: int = 0
    times: list[float] = field(default_factory=list)


class Server:
    """A context of `rows` sequences over one GGUF file."""

    def __init__(self, path: str, threads: int, rows: int, length: int) -> None:
        sizes = {"n_ctx": rows * length, "n_batch": _BATCH, "n_ubatch": _UBATCH, "n_seq_max": rows}
        self.context, self.vocab = open_context(path, threads, **sizes)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.rows: list[ServedSequence | None] = [None] * rows
        self.batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def serve(self, requests: list[tuple[list[int], int]], callers: int) -> dict[str, Any]:
        """Serve all requests, `callers` at a time. Returns what topw_lab/bench/serve.py describes.

        Every token counts as a text.
        """
        began = time.perf_counter()
        coming = iter(requests)
        served: list[ServedSequence] = []
        waiting: deque[ServedSequence] = deque()

        def send() -> None:
            following = next(coming, None)
            if following is not None:
                waiting.append(ServedSequence(*following, asked=time.perf_counter()))

        for _ in range(callers):
            send()
        while waiting or any(self.rows):
            for row in [row for row, sequence in enumerate(self.rows) if sequence is None][: len(waiting)]:
                self.rows[row] = waiting.popleft()
            for row, token in self._run().items():
                sequence = self.rows[row]
                assert sequence is not None
                sequence.times.append(time.perf_counter())
                sequence.token, sequence.left = token, sequence.left - 1
                if not sequence.left:
                    served.append(sequence)
                    self.rows[row] = None
                    llama_cpp.llama_memory_seq_rm(self.memory, row, -1, -1)
                    send()
        between = [later - earlier for s in served for earlier, later in zip(s.times, s.times[1:], strict=False)]
        first = [sequence.times[0] - sequence.asked for sequence in served]
        return {"seconds": time.perf_counter() - began, "first": first, "between": between}

    def _run(self) -> dict[int, int]:
        """Run one batch. Returns row -> token, for the rows that drew a token."""
        ids: list[int] = []
        places: list[tuple[int, int, bool]] = []  # (row, position, whether it draws)
        for row, sequence in enumerate(self.rows):
            if sequence is not None and sequence.read == len(sequence.prompt):
                ids.append(sequence.token)
                places.append((row, sequence.length, True))
                sequence.length += 1
        for row, sequence in enumerate(self.rows):
            if sequence is not None and sequence.read < len(sequence.prompt):
                end = min(len(sequence.prompt), sequence.read + _BATCH - len(ids))
                places += [(row, at, at + 1 == len(sequence.prompt)) for at in range(sequence.read, end)]
                ids += sequence.prompt[sequence.read : end]
                sequence.read = sequence.length = end
        batch = self.batch
        batch.n_tokens = len(ids)
        for index, (token, (row, position, draws)) in enumerate(zip(ids, places, strict=True)):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, draws
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        failed = llama_cpp.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        drawn = {}
        for index, (row, _, draws) in enumerate(places):
            if draws:
                pointer = llama_cpp.llama_get_logits_ith(self.context, index)
                floats = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
                drawn[row] = int(np.ctypeslib.as_array(floats, shape=(self.vocab,)).argmax())
        return drawn


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """settings: file (GGUF), threads, rows (maximum number of sequences), length (maximum tokens of each)."""
    made = start_files(settings)  # starts the backend
    server = Server(settings["file"], settings["threads"], settings["rows"], settings["length"])
    return {"serve": server.serve, "files": lambda: sorted(made)}

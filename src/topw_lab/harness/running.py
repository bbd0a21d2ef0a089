"""Runs requests through the engine and returns their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from topw_deploy.engine import Engine
from topw_deploy.runtime import GenerationResult, TopWModel

PromptRequest: TypeAlias = "tuple[list[int], Mapping[str, Any]]"
"""A prompt's token ids and the parameters of `TopWModel.generate`."""

_AHEAD = 8  # requests per row that are submitted early, so that rows are not idle while a long request runs


class Runner:
    """Generates from many prompts: in an Engine, or one by one if the cache is not `static`.

    rows: `max_batch` of Engine.
    options: other options of Engine.
    reuses: whether the states of the tokens that begin an earlier prompt, too, are reused.
    """

    def __init__(self, model: TopWModel, rows: int, options: Mapping[str, Any]) -> None:
        self._model, self._ahead = model, _AHEAD * rows
        self._engine: Engine | None = None
        decoder = model.manifest.decoder
        self.reuses = decoder.kv_form == "static" and not decoder.recurs and options.get("reuse_prefixes") is not False
        if decoder.kv_form == "static":
            self._engine = Engine(model, max_batch=rows, max_queue=self._ahead, when_full="wait", **options)

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def results(self, requests: Iterable[PromptRequest]) -> Iterator[GenerationResult]:
        """Yield a result for each request, in order. Raises a request's error, after cancelling the later requests."""
        if self._engine is None:
            for prompt, parameters in requests:
                yield self._model.generate(prompt, **parameters)
            return
        running: deque[Any] = deque()
        try:
            for prompt, parameters in requests:
                running.append(self._engine.submit(prompt, **parameters))
                if len(running) >= self._ahead:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for request in running:
                request.cancel()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

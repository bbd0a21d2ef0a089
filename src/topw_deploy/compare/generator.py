"""Requests over the engine, or one by one where the cache has another form."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from topw_deploy.engine import Engine
from topw_deploy.runtime import GenerationResult, TopWModel

_WAITING = 8  # sequences per row that are submitted ahead, so that a long one does not leave rows idle


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt's token ids, the parameters of `TopWModel.generate`, and how many tokens they allow."""

    ids: list[int]
    parameters: Mapping[str, Any]
    budget: int

    def under(self, parameters: Mapping[str, Any]) -> Asked:
        return replace(self, parameters={**self.parameters, **parameters})

    def short(self) -> Asked:
        """The same for one token of one text."""
        kept = {name: value for name, value in self.parameters.items() if name != "max_length"}
        return replace(self, parameters={**kept, "max_new_tokens": 1, "num_return_sequences": 1})


class Generator(contextlib.AbstractContextManager["Generator"]):
    """Generates from many prompts: together over an Engine, or one by one if the cache has no form for it.

    rows: sequences that run at once.
    length: maximum tokens of a sequence, with its prompt.
    samples: maximum sequences of a request.
    """

    def __init__(self, model: TopWModel, rows: int, length: int, samples: int) -> None:
        self._model, self._ahead = model, max(1, _WAITING * rows // samples)
        self._engine: Engine | None = None
        if model.manifest.decoder.kv_form == "static":
            queue = max(_WAITING * rows, samples)
            # exact: texts must not depend on which rules ran before.
            self._engine = Engine(
                model, max_batch=rows, max_length=length, max_queue=queue, when_full="wait", exact=True
            )

    def results(self, asked: Iterable[Asked]) -> Iterator[list[GenerationResult]]:
        """The texts of each request, in order. Raises the first error of a request."""
        if self._engine is None:
            for one in asked:
                yield _listed(self._model.generate(one.ids, **one.parameters))
            return
        running: deque[Any] = deque()
        for one in asked:
            running.append(self._engine.submit(one.ids, **one.parameters))
            if len(running) >= self._ahead:
                yield _listed(running.popleft().result())
        while running:
            yield _listed(running.popleft().result())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine, and cancel what still runs if the block failed."""
        if self._engine is not None:
            self._engine.__exit__(kind, error, trace)


def _listed(found: Any) -> list[GenerationResult]:
    return found if isinstance(found, list) else [found]

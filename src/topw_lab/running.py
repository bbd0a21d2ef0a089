"""Run many requests through the engine and return their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError, PromptError, TokenizerError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.sequence import Sequence

PromptRequest: TypeAlias = "tuple[list[int], Mapping[str, Any]]"
"""A prompt's token ids and the parameters of `TopWModel.generate`."""

_AHEAD = 8  # sequences per row that are submitted early, so that rows are not idle while a long sequence runs


def prepare_prompt(model: TopWModel, prompt: Any, where: str, **parameters: Any) -> Sequence:
    """The sequence of a prompt: a text, token ids or messages. Raises errors that name the place `where`."""
    try:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = model.tokenizer.encode(model.apply_chat_template(prompt), add_special_tokens=False)
        return model.prepare(prompt, **parameters)[0]
    except (PromptError, ParameterError, TokenizerError) as error:
        raise type(error)(f"{where}: {error}", *error.parameters) from None


class Runner:
    """Generates from many prompts: in an Engine, or one by one if the cache is not `static`.

    rows: `max_batch` of Engine.
    samples: maximum number of sequences of a request.
    options: other options of Engine.
    """

    def __init__(self, model: TopWModel, rows: int, samples: int = 1, **options: Any) -> None:
        self._model, self._ahead = model, max(1, _AHEAD * rows // samples)
        self.engine: Engine | None = None
        if model.manifest.decoder.kv_form == "static":
            queue = max(_AHEAD * rows, samples)
            self.engine = Engine(model, max_batch=rows, max_queue=queue, when_full="wait", **options)

    def results(self, requests: Iterable[PromptRequest]) -> Iterator[Any]:
        """Yield what `generate` returns for each request, in order.

        Raises a request's error, after cancelling the later requests.
        """
        if self.engine is None:
            for prompt, parameters in requests:
                yield self._model.generate(prompt, **parameters)
            return
        running: deque[Any] = deque()
        try:
            for prompt, parameters in requests:
                running.append(self.engine.submit(prompt, **parameters))
                if len(running) >= self._ahead:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for request in running:
                request.cancel()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

"""Callbacks of a request: a streamer receives tokens, stopping criteria end a sequence.

Both may be transformers' own objects, or have the same interface; any other criterion is a function of the token ids.
This module imports neither torch nor transformers.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np

from topw_deploy.errors import ParameterError

Criterion: TypeAlias = Callable[[np.ndarray], object]
"""A function from the token ids, int64 [T] with the prompt's, to whether the sequence ends."""


class Streamer(Protocol):
    """Like transformers' BaseStreamer: `put` takes the prompt, int64 [1, S], then each token, int64 [1]."""

    def put(self, value: np.ndarray, /) -> object: ...
    def end(self) -> object: ...


class RowCallbacks:
    """Passes one sequence's tokens to its callbacks.

    budget: maximum new tokens.
    """

    def __init__(
        self, prompt: Sequence[int], budget: int, streamer: Streamer | None, criteria: Sequence[Criterion]
    ) -> None:
        self._streamer = streamer
        self._criteria = [(criterion, _is_transformers(criterion)) for criterion in criteria]
        self._ids = np.empty(len(prompt) + budget, np.int64)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)

    def stream_prompt(self) -> None:
        """Stream the prompt."""
        if self._streamer is not None:
            self._streamer.put(self._ids[None, : self._length].copy())

    def add_token(self, token: int) -> None:
        """Stream a drawn token."""
        self._ids[self._length] = token
        self._length += 1
        if self._streamer is not None:
            self._streamer.put(np.array([token], np.int64))

    def met_criterion(self) -> str | None:
        """The name of the first criterion that ends the sequence, or None.

        Raises ParameterError for a criterion that does not return a boolean.
        """
        for criterion, takes_tensors in self._criteria:
            if self._is_met(criterion, takes_tensors):
                return criterion_name(criterion)
        return None

    def _is_met(self, criterion: Any, takes_tensors: bool) -> bool:
        ids = self._ids[: self._length]
        if takes_tensors:
            answer = criterion(sys.modules["torch"].from_numpy(ids[None]), None)
        else:
            ids.setflags(write=False)
            answer = criterion(ids)
        if math.prod(getattr(answer, "shape", (0,))) == 1:  # one value
            answer = answer.item()
        if not isinstance(answer, bool):
            raise ParameterError(
                f"stopping_criteria: {criterion_name(criterion)} returned a {type(answer).__name__}, but must "
                "return True or False for its one sequence."
            )
        return answer


def criterion_name(criterion: object) -> str:
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def check_streamer(name: str, value: Any) -> Streamer:
    """Check the parameter `name`. Raises ParameterError if `value` lacks a method `put` or `end`."""
    _refuse_class(name, value)
    if not callable(getattr(value, "put", None)) or not callable(getattr(value, "end", None)):
        raise ParameterError(
            f"{name} is a {type(value).__name__}, but must have methods put and end, like transformers' TextStreamer."
        )
    streamer: Streamer = value
    return streamer


def check_criteria(name: str, value: Any) -> tuple[Criterion, ...]:
    """Check the parameter `name`, a criterion or a list of criteria.

    Raises ParameterError for a criterion that cannot be called with token ids alone.
    """
    criteria = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for criterion in criteria:
        _refuse_class(name, criterion)
        if not callable(criterion):
            raise ParameterError(
                f"{name} has a {type(criterion).__name__}, but must be a function of token ids, or a list of functions."
            )
        if not _is_transformers(criterion) and not _takes_ids_alone(criterion):
            raise ParameterError(
                f"{name}: {criterion_name(criterion)} cannot be called with the token ids alone; remove its other "
                "arguments, or make it a subclass of transformers' StoppingCriteria."
            )
    return criteria


@contextmanager
def end_on_failure(streamer: Any) -> Iterator[None]:
    """End `streamer` if the block fails."""
    try:
        yield
    except BaseException:
        end_streamer(streamer)
        raise


def end_streamer(streamer: Any) -> None:
    """End the streamer of a failed call, because its reader would wait forever.

    streamer: the value of the parameter, unchecked.
    """
    if callable(getattr(streamer, "end", None)) and not isinstance(streamer, type):
        streamer.end()


def _refuse_class(name: str, value: object) -> None:
    if isinstance(value, type):
        raise ParameterError(f"{name} is the class {value.__name__}; give an instance of it.")


def _is_transformers(criterion: object) -> bool:
    return any(
        kind.__name__ == "StoppingCriteria" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(criterion).__mro__
    )


def _takes_ids_alone(criterion: Callable[..., object]) -> bool:
    try:
        inspect.signature(criterion).bind(None)
    except ValueError:  # some built-in functions have no signature
        return True
    except TypeError:
        return False
    return True

"""Code of the caller's that follows a generation: a streamer, which is given the tokens, and stopping criteria, which
end a sequence.

A streamer has `put` and `end`, as transformers' streamers do. A criterion is called with the token ids so far; objects
of transformers' class StoppingCriteria are called as transformers calls them. Neither library is imported.
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
"""Token ids of one sequence, prompt included, int64 [T] -> whether it ends here."""


class Streamer(Protocol):
    """transformers' BaseStreamer: `put` takes the prompt, int64 [1, S], then each token, int64 [1]."""

    def put(self, value: np.ndarray, /) -> object: ...
    def end(self) -> object: ...


class Watch:
    """One sequence as the caller's code follows it.

    prompt: token ids. budget: most tokens that will follow. streamer: None for none.
    """

    def __init__(
        self, prompt: Sequence[int], budget: int, streamer: Streamer | None, criteria: Sequence[Criterion]
    ) -> None:
        self._streamer = streamer
        self._criteria = [(criterion, _is_transformers(criterion)) for criterion in criteria]
        self._ids = np.empty(len(prompt) + budget, np.int64)
        self._ids[: len(prompt)] = prompt
        self._length = len(prompt)

    def begin(self) -> None:
        """Give the prompt to the streamer."""
        if self._streamer is not None:
            self._streamer.put(self._ids[None, : self._length].copy())

    def take(self, token: int) -> None:
        """Give a drawn token to the streamer."""
        self._ids[self._length] = token
        self._length += 1
        if self._streamer is not None:
            self._streamer.put(np.array([token], np.int64))

    def ended_by(self) -> str | None:
        """The name of the first criterion that ends the sequence here, None if it goes on.

        Raises ParameterError where a criterion answers with anything but True or False.
        """
        for criterion, takes_tensors in self._criteria:
            if self._asks_to_end(criterion, takes_tensors):
                return name_of(criterion)
        return None

    def _asks_to_end(self, criterion: Any, takes_tensors: bool) -> bool:
        ids = self._ids[: self._length]
        if takes_tensors:
            answer = criterion(sys.modules["torch"].from_numpy(ids[None]), None)
        else:
            ids.setflags(write=False)
            answer = criterion(ids)
        if math.prod(getattr(answer, "shape", (0,))) == 1:  # an array or a tensor with one value
            answer = answer.item()
        if not isinstance(answer, bool):
            raise ParameterError(
                f"stopping_criteria: {name_of(criterion)} returned a {type(answer).__name__}, but must return True or "
                "False for the one sequence that it was given."
            )
        return answer


def name_of(criterion: object) -> str:
    """What results call a criterion: a function's name, else its class's."""
    return str(getattr(criterion, "__name__", type(criterion).__name__))


def check_streamer(name: str, value: Any) -> Streamer:
    """`value`, or ParameterError where it has no `put` and `end`."""
    _check_object(name, value)
    if not callable(getattr(value, "put", None)) or not callable(getattr(value, "end", None)):
        raise ParameterError(
            f"{name} is a {type(value).__name__}, but must have the methods put and end, as transformers' TextStreamer."
        )
    streamer: Streamer = value
    return streamer


def check_criteria(name: str, value: Any) -> tuple[Criterion, ...]:
    """One criterion or a list of several, or ParameterError where one of them cannot be called with token ids."""
    criteria = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for criterion in criteria:
        _check_object(name, criterion)
        if not callable(criterion):
            raise ParameterError(
                f"{name} has a {type(criterion).__name__}, but must be a function of the token ids, or a list of such."
            )
        if not _is_transformers(criterion) and not _takes_ids_alone(criterion):
            raise ParameterError(
                f"{name}: {name_of(criterion)} cannot be called with the token ids alone; remove its other arguments, "
                "or derive it from transformers' StoppingCriteria."
            )
    return criteria


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """End `streamer`, whatever it is, where the block fails: a thread that reads from it must not wait for ever."""
    try:
        yield
    except BaseException:
        if callable(getattr(streamer, "end", None)) and not isinstance(streamer, type):
            streamer.end()
        raise


def _check_object(name: str, value: object) -> None:
    if isinstance(value, type):
        raise ParameterError(f"{name} is the class {value.__name__}; give an object of it.")


def _is_transformers(criterion: object) -> bool:
    return any(
        kind.__name__ == "StoppingCriteria" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(criterion).__mro__
    )


def _takes_ids_alone(criterion: Callable[..., object]) -> bool:
    try:
        inspect.signature(criterion).bind(None)
    except ValueError:  # some built-in functions do not tell
        return True
    except TypeError:
        return False
    return True

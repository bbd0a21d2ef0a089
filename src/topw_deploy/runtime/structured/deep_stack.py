"""Runs a function on a large stack, because llguidance's compiler recurses into every name that a rule refers to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from topw_deploy.errors import GenerationError

STACK = 256 * 2**20
"""Bytes of address space. Only the used part takes memory. The deepest grammars found need a tenth."""

_starting = threading.Lock()
Result = TypeVar("Result")


class _Call(Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self.results: list[Result] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.results.append(self._function())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            self.error = error


def call_deep(function: Callable[[], Result], seconds: float) -> Result | None:
    """The function's result, or None if it takes longer than `seconds`. It then continues in the background.

    Raises the function's errors, and GenerationError if there is no address space for the stack.
    """
    call = _Call(function)
    thread = threading.Thread(target=call, name="topw-grammar", daemon=True)
    with _starting:  # stack_size applies to the whole process
        before = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError:
            raise GenerationError(
                f"there is no address space for a stack of {STACK // 2**20} MiB to compile the grammar on; raise the "
                "process's limit."
            ) from None
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    if call.error is not None:
        raise call.error
    return call.results[0] if call.results else None

"""Errors as OpenAI's error objects: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from topw_deploy.errors import (
    GenerationError,
    GrammarError,
    LogitsError,
    MissingPackageError,
    ParameterError,
    PromptError,
    QueueFullError,
    TokenizerError,
    TopWError,
)

INVALID = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Failure:
    """An error response.

    param: the field that is wrong, if any.
    headers: of the response.
    """

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The response's body, also the data of an event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class RequestError(TopWError):
    """A request that the server refuses before the engine does."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid(message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> RequestError:
    """The error for a wrong field `param`."""
    return RequestError(Failure(status, INVALID, code, message, param))


def unavailable(message: str, code: str = "unavailable") -> RequestError:
    """The error of a server that cannot answer now."""
    return RequestError(Failure(503, "server_error", code, message, headers=RETRY))


_TYPED: tuple[tuple[type[TopWError], Failure], ...] = (
    (GrammarError, Failure(400, INVALID, "invalid_grammar", "")),
    (PromptError, Failure(400, INVALID, "invalid_prompt", "")),
    (ParameterError, Failure(400, INVALID, "invalid_value", "")),
    (TokenizerError, Failure(422, INVALID, "unprocessable_prompt", "")),
    (LogitsError, Failure(422, INVALID, "no_token_to_draw", "")),
    (QueueFullError, Failure(429, "rate_limit_error", "queue_full", "", headers=RETRY)),
    (MissingPackageError, Failure(501, "server_error", "missing_package", "")),
    (GenerationError, Failure(503, "server_error", "unavailable", "", headers=RETRY)),
)
"""The first class that fits counts."""

_INTERNAL = Failure(500, "server_error", "internal_error", "the server failed; its log has the reason.")


def failure_of(error: BaseException) -> Failure:
    """The response to `error`. For an unexpected one it reveals nothing about the server."""
    if isinstance(error, RequestError):
        return error.failure
    found = next((failure for kind, failure in _TYPED if isinstance(error, kind)), None)
    if found is None or not isinstance(error, TopWError):
        return _INTERNAL
    param = next(iter(error.parameters), None)
    if isinstance(error, PromptError) and param == "max_length":
        return replace(found, message=str(error), code=TOO_LONG)
    return replace(found, message=str(error), param=param)


def expected(error: BaseException) -> bool:
    """Whether `error` is caused by a client or a known state of the server, and needs no traceback in the log."""
    return failure_of(error) is not _INTERNAL

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
RETRY_HEADERS = {"Retry-After": "1"}


@dataclass(frozen=True)
class Failure:
    """An error response.

    status: HTTP status.
    type, code: OpenAI's, or names in their style.
    param: name of the wrong field, if there is one.
    headers: further headers of the response.
    """

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The body of the response, or the data of an event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class RequestError(TopWError):
    """The server refuses a request, or cannot answer it now.

    failure: the response.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def invalid_request(
    message: str, param: str | None = None, code: str = "invalid_value", status: int = 400
) -> RequestError:
    """The error for a wrong field `param`."""
    return RequestError(Failure(status, INVALID, code, message, param))


def server_unavailable(message: str, code: str = "unavailable") -> RequestError:
    """The error of a server that cannot answer now."""
    return RequestError(Failure(503, "server_error", code, message, headers=RETRY_HEADERS))


_FAILURE_OF_CLASS: tuple[tuple[type[TopWError], Failure], ...] = (
    (GrammarError, Failure(400, INVALID, "invalid_grammar", "")),
    (PromptError, Failure(400, INVALID, "invalid_prompt", "")),
    (ParameterError, Failure(400, INVALID, "invalid_value", "")),
    (TokenizerError, Failure(422, INVALID, "unprocessable_prompt", "")),
    (LogitsError, Failure(422, INVALID, "no_token_to_draw", "")),
    (QueueFullError, Failure(429, "rate_limit_error", "queue_full", "", headers=RETRY_HEADERS)),
    (MissingPackageError, Failure(501, "server_error", "missing_package", "")),
    (GenerationError, Failure(503, "server_error", "unavailable", "", headers=RETRY_HEADERS)),
)
"""The response to an error of a class, without the message. Of several classes that fit, the first one counts."""

_INTERNAL = Failure(500, "server_error", "internal_error", "the server failed; its log has the reason.")


def failure_of(error: BaseException) -> Failure:
    """The response to `error`. If the error is unexpected, the response reveals nothing about the server."""
    if isinstance(error, RequestError):
        return error.failure
    found = next((failure for kind, failure in _FAILURE_OF_CLASS if isinstance(error, kind)), None)
    if found is None or not isinstance(error, TopWError):
        return _INTERNAL
    param = next(iter(error.parameters), None)
    if isinstance(error, PromptError) and param == "max_length":
        return replace(found, message=str(error), code=TOO_LONG)
    return replace(found, message=str(error), param=param)


def is_expected(error: BaseException) -> bool:
    """Whether a client or a known state of the server caused `error`, so that the log needs no traceback."""
    return failure_of(error) is not _INTERNAL

"""Errors as OpenAI's error objects: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

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

TOO_LONG = "context_length_exceeded"
RETRY = {"Retry-After": "1"}
_HEADERS = {429: RETRY, 503: RETRY, 415: {"Accept-Encoding": "identity"}}


class RequestError(TopWError):
    """The server refuses a request, or cannot answer it.

    param: name of the wrong field, if there is one.
    code: OpenAI's, or a name in their style.
    status: HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def as_dict(self) -> dict[str, Any]:
        """The body of the response, or the data of an event in a stream."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """The response. headers: further ones."""
        return JSONResponse(self.as_dict(), self.status, headers or _HEADERS.get(self.status))


_CODES: tuple[tuple[type[TopWError], int, str], ...] = (
    (GrammarError, 400, "invalid_grammar"),
    (PromptError, 400, "invalid_prompt"),
    (ParameterError, 400, "invalid_value"),
    (TokenizerError, 422, "unprocessable_prompt"),
    (LogitsError, 422, "no_token_to_draw"),
    (QueueFullError, 429, "queue_full"),
    (MissingPackageError, 501, "missing_package"),
    (GenerationError, 503, "unavailable"),
)
"""(class of errors, status, code). Of several classes that fit, the first one counts."""


def failure_of(error: BaseException) -> RequestError:
    """The failure to answer for `error`. If the error is unexpected, it has status 500 and reveals nothing."""
    if isinstance(error, RequestError):
        return error
    for kind, status, code in _CODES:
        if isinstance(error, kind):
            param = next(iter(error.parameters), None)
            if isinstance(error, PromptError) and param == "max_length":
                return RequestError(str(error), None, TOO_LONG, status)
            return RequestError(str(error), param, code, status)
    return RequestError("the server failed; its log has the reason.", None, "internal_error", 500)

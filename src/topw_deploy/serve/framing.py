"""Refuses requests whose end a proxy and the server may see at different places (request smuggling)."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from topw_deploy.serve.failures import INVALID, Failure

_AMBIGUOUS = Failure(
    400,
    INVALID,
    "ambiguous_length",
    "the body's length is stated twice, or in a way that HTTP/1.0 lacks; send Content-Length or Transfer-Encoding.",
)


class Framing:
    """Answers 400 and closes the connection if a request has both Content-Length and Transfer-Encoding.

    RFC 9112, 6.1: if a proxy uses one of them and this server the other, a part of the body counts as the next
    request. Transfer-Encoding in HTTP/1.0 is refused for the same reason.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_ambiguous(scope):
            response = JSONResponse(_AMBIGUOUS.as_dict(), _AMBIGUOUS.status, {"Connection": "close"})
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_ambiguous(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" not in names:
        return False
    return b"content-length" in names or scope["http_version"] < "1.1"

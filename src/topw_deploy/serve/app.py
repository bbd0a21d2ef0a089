"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from topw_deploy.errors import TopWError
from topw_deploy.serve.access import OPEN_PATHS, AccessLog, KeyCheck, LengthCheck, log_entry_of
from topw_deploy.serve.chat import chat_completions
from topw_deploy.serve.completions import completions
from topw_deploy.serve.failures import INVALID, Failure, failure_of
from topw_deploy.serve.inspect import inspect
from topw_deploy.serve.options import ServeOptions
from topw_deploy.serve.page import page
from topw_deploy.serve.responses import responses
from topw_deploy.serve.service import Service
from topw_deploy.serve.status import health, live, metrics, model, models
from topw_deploy.serve.tokens import detokenize, tokenize

ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/live", live, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
)
PAGE_ROUTES = (
    Route("/", page, methods=["GET"]),
    Route("/topw/inspect", inspect, methods=["POST"]),
)


def create_app(options: ServeOptions) -> Starlette:
    """Create the application. `app.state.service` is its Service.

    Its lifespan opens the models. Until they are open, requests get 503.
    """
    service = Service(options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    log = Middleware(AccessLog, on_request=service.count_request, on_answer=service.metrics.count_answer)
    middleware = [log, Middleware(LengthCheck)]
    if options.cors_origins:
        origins = list(options.cors_origins)
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )
        )
    if options.api_keys:
        paths = OPEN_PATHS | {"/"} if options.page else OPEN_PATHS  # the page itself asks for the key
        middleware.append(Middleware(KeyCheck, keys=options.api_keys, open_paths=paths))
    handlers = {TopWError: _answer_error, HTTPException: _answer_http_error, ClientDisconnect: _answer_nobody}
    routes = [*ROUTES, *(PAGE_ROUTES if options.page else ())]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.state.service = service
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    if failure.status == 500:
        raise error  # AccessLog logs it with its traceback
    log_entry_of(request).facts["error"] = failure.code
    return JSONResponse(failure.as_dict(), failure.status, dict(failure.headers))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    failure = Failure(error.status_code, INVALID, code, message)
    return JSONResponse(failure.as_dict(), failure.status, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The answer to a client that has disconnected. It is never sent; its status is logged."""
    log_entry_of(request).facts["error"] = "client_gone"
    return Response(status_code=499)

"""The ASGI application: routes, middleware, error handlers, and the endpoints that generate nothing."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from topw_deploy.errors import TopWError
from topw_deploy.serve.chat import chat_completions, render
from topw_deploy.serve.completions import completions
from topw_deploy.serve.failures import RETRY, RequestError, failure_of
from topw_deploy.serve.inspect import inspect
from topw_deploy.serve.openapi import openapi
from topw_deploy.serve.page import page
from topw_deploy.serve.responses import responses
from topw_deploy.serve.schemas import DetokenizeRequest, TokenizeRequest
from topw_deploy.serve.service import ServeOptions, Service, service_of
from topw_deploy.serve.stream import Run, read_body

LOG = logging.getLogger("topw_deploy.serve")
OPEN_PATHS = frozenset({"/health", "/live"})
"""Paths that need no key, because probes have none."""

_ID_HEADER = "X-Request-Id"
_LONGEST_ID = 128  # characters
_AMBIGUOUS = "the body's length is stated twice, or in a way that HTTP/1.0 lacks; send one length."
_CLIENT_GONE = 499  # nginx' status for a client that closed the connection


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

    middleware = [Middleware(AccessLog, service=service)]
    if options.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[_ID_HEADER],
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
    run = request.scope.get("topw.run")
    failure: RequestError = failure_of(error) if run is None else run.failure_of(error)
    if failure.status == 500:
        raise error  # AccessLog logs it with its traceback
    request.scope["topw.facts"]["error"] = failure.code
    return failure.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    return RequestError(message, None, code, error.status_code).response(dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The answer to a client that has disconnected. It is never sent; its status is logged."""
    request.scope["topw.facts"]["error"] = "client_gone"
    return Response(status_code=_CLIENT_GONE)


async def health(request: Request) -> Response:
    """Answer 200 if requests are accepted, `/live` also unless the models could not be opened; else 503."""
    state = service_of(request).state
    ok = state == "ready" if request.url.path == "/health" else state != "failed"
    return JSONResponse({"status": "ok" if state == "ready" else state}, 200 if ok else 503, None if ok else RETRY)


async def metrics(request: Request) -> Response:
    """Answer the metrics in Prometheus' text format."""
    return Response(generate_latest(service_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> Response:
    """List the served models, or describe the one that the path names."""
    service = service_of(request)
    service.check_ready()
    name = request.path_params.get("name")
    entries = [
        {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "topw_deploy",
            "max_model_len": served.length,
            "topw": served.abilities,
        }
        for served in (service.served() if name is None else [service.find(name)])
    ]
    return JSONResponse({"object": "list", "data": entries} if name is None else entries[0])


async def tokenize(request: Request) -> Response:
    """Answer the token ids of a text, or of the rendered messages of a chat."""
    body = await read_body(request, TokenizeRequest)
    run = Run(request, body, "tokenize", "prompt")
    served = run.served
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give one of prompt and messages.", "prompt")

    def encode() -> list[int]:
        text, adds = body.prompt or "", body.add_special_tokens
        if body.messages is not None:
            text, adds = render(served, body.messages, body.chat_template_kwargs, body.tools or None), False
        return served.model.encode(text, adds, limits=served.engine.limits)

    ids = await run.prepare(encode)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.length, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [served.model.tokenizer.text_of(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """Answer the text of token ids, special tokens included."""
    body = await read_body(request, DetokenizeRequest)
    run = Run(request, body, "detokenize", "tokens")
    model = run.served.model
    size = model.manifest.sampler.vocab_size
    if not all(0 <= token < size for token in body.tokens):
        raise RequestError(f"tokens has an id that is not from 0 to {size - 1}.", "tokens")
    return JSONResponse({"prompt": await run.prepare(lambda: model.tokenizer.decode(body.tokens, False))})


class AccessLog:
    """Gives each request an id, counts it, writes its log entry, and answers 500 if the application fails.

    The scope's "topw.facts" is the entry, to which the endpoints add.

    A slash at the end of a path is ignored. Starlette would redirect, to `http` also behind a proxy with TLS, and few
    clients repeat a POST request.

    Answers 400 and closes the connection if a request has both Content-Length and Transfer-Encoding. RFC 9112, 6.1: if
    a proxy uses one header and this server the other, they see the end of the body at different places, and a part of
    the body counts as the next request (request smuggling). Transfer-Encoding in HTTP/1.0 is refused for the same
    reason.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        stated = Headers(scope=scope).get(_ID_HEADER, "")
        usable = 0 < len(stated) <= _LONGEST_ID and stated.isascii() and stated.isprintable()
        facts = {
            "request_id": stated if usable else secrets.token_hex(16),
            "method": scope["method"],
            "path": scope["path"],
        }
        scope["topw.facts"] = facts
        scope["path"] = scope["path"].rstrip("/") or "/"

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_ID_HEADER] = facts["request_id"]
            await send(message)

        counted = int(scope["method"] == "POST")
        self._service.count_request(counted)
        try:
            names = {name for name, _ in scope["headers"]}
            if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] < "1.1"):
                failure = RequestError(_AMBIGUOUS, None, "ambiguous_length")
                await failure.response({"Connection": "close"})(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:  # one request must not end the server
            LOG.exception("the request failed", extra={"facts": {"request_id": facts["request_id"]}})
            if not status:
                await failure_of(error).response()(scope, receive, send_with_id)
        finally:
            self._service.count_request(-counted)
            status = status or _CLIENT_GONE
            self._service.metrics.count_answer(scope["path"].removeprefix(scope.get("root_path", "")), status)
            client = scope.get("client")
            facts |= {
                "status": status,
                "seconds": round(time.perf_counter() - started, 6),
                "client": client[0] if client else None,
            }
            level = logging.DEBUG if scope["method"] == "GET" and status < 400 else logging.INFO
            LOG.log(level, "request", extra={"facts": facts})


class KeyCheck:
    """Refuses requests without one of the keys, given as `Authorization: Bearer KEY`.

    open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app, self._keys, self._open_paths = app, [key.encode() for key in keys], open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'."
        failure = RequestError(message, None, "invalid_api_key", 401)
        await failure.response({"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace")
        # All keys are compared, so that the time reveals nothing about them.
        return bool(sum([secrets.compare_digest(key, each) for each in self._keys])) and scheme.lower() == "bearer"


ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", models, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/live", health, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
)
PAGE_ROUTES = (
    Route("/", page, methods=["GET"]),
    Route("/topw/inspect", inspect, methods=["POST"]),
)

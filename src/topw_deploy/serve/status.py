"""/health, /live, /metrics and /v1/models."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.serve.failures import RETRY
from topw_deploy.serve.requests import service_of
from topw_deploy.serve.served import Served


async def health(request: Request) -> Response:
    """200 if requests are accepted, else 503."""
    state = service_of(request).state
    ready = state == "ready"
    return JSONResponse({"status": "ok" if ready else state}, 200 if ready else 503, None if ready else RETRY)


async def live(request: Request) -> Response:
    """200 unless the models could not be opened; also while they are loaded, and while requests are drained."""
    state = service_of(request).state
    return JSONResponse({"status": state}, 503 if state == "failed" else 200)


async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> Response:
    """The served models."""
    service = service_of(request)
    service.check_ready()
    return JSONResponse({"object": "list", "data": [_described(each) for each in service.served()]})


async def model(request: Request) -> Response:
    """One served model."""
    return JSONResponse(_described(service_of(request).find(request.path_params["name"])))


def _described(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "topw_deploy",
        "max_model_len": served.length,
        "topw": served.abilities,
    }

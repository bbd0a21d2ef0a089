"""/health, /live, /metrics and /v1/models."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from topw_deploy.serve.failures import RETRY_HEADERS
from topw_deploy.serve.served import Served
from topw_deploy.serve.service import service_of


async def health(request: Request) -> Response:
    """Answer 200 if requests are accepted, else 503."""
    state = service_of(request).state
    ready = state == "ready"
    return JSONResponse({"status": "ok" if ready else state}, 200 if ready else 503, None if ready else RETRY_HEADERS)


async def live(request: Request) -> Response:
    """Answer 503 if the models could not be opened, else 200, also while they are loaded and while requests drain."""
    state = service_of(request).state
    return JSONResponse({"status": state}, 503 if state == "failed" else 200)


async def metrics(request: Request) -> Response:
    """Answer the metrics in Prometheus' text format."""
    return Response(service_of(request).metrics.as_text(), media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> Response:
    """List the served models."""
    service = service_of(request)
    service.check_ready()
    return JSONResponse({"object": "list", "data": [_model_entry(each) for each in service.served()]})


async def model(request: Request) -> Response:
    """Describe one served model."""
    return JSONResponse(_model_entry(service_of(request).find(request.path_params["name"])))


def _model_entry(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "topw_deploy",
        "max_model_len": served.length,
        "topw": served.abilities,
    }

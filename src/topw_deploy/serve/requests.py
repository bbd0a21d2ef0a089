"""An endpoint's access to its request: the service, and the checked body."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from topw_deploy.serve.bodies import read_body
from topw_deploy.serve.service import Service

Body = TypeVar("Body", bound=BaseModel)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def read(request: Request, schema: type[Body]) -> Body:
    """The checked body. Raises RequestError; 503, without reading it, unless requests are accepted."""
    service = service_of(request)
    service.check_ready()
    options = service.options
    return await read_body(request, schema, most=options.max_body, seconds=options.body_timeout)

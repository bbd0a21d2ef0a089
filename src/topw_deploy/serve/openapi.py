"""/openapi.json: the endpoints and the fields of their requests, from the routes, the schemas and the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from topw_deploy.install import installed_version
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS
from topw_deploy.serve import schemas

_BODIES: dict[str, type[schemas.ModelRequest]] = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/v1/responses": schemas.ResponsesRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
    "/topw/inspect": schemas.InspectRequest,
}
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_REFERENCE = "#/components/schemas/{model}"


async def openapi(request: Request) -> Response:
    """Describe the endpoints in the format of OpenAPI 3.1."""
    return JSONResponse(_document([route for route in request.app.routes if isinstance(route, Route)]))


def _document(routes: Sequence[Route]) -> dict[str, Any]:
    _, found = models_json_schema([(body, "validation") for body in _BODIES.values()], ref_template=_REFERENCE)
    for body in _BODIES.values():
        described = found["$defs"][body.__name__]
        if issubclass(body, schemas.GenerationRequest):
            fields = {**{name: _field(name) for name in sorted(schemas.FIELDS)}, **described["properties"]}
            described["properties"] = {name: field for name, field in fields.items() if name not in body.refused}
            described["additionalProperties"] = False
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": str(route.endpoint.__doc__).partition("\n")[0],
            "responses": {"200": {"description": "the answer"}, "default": {"description": "an error, as OpenAI's"}},
        }
        if takes := _BODIES.get(route.path):
            content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=takes.__name__)}}}
            operation["requestBody"] = {"required": True, "content": content}
        if "{name:path}" in route.path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        for method in (route.methods or set()) - {"HEAD"}:
            paths.setdefault(route.path.replace(":path", ""), {})[method.lower()] = operation
    about = {"title": "topw_deploy", "version": installed_version("topw-deploy") or "0"}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": found["$defs"]}}


def _field(name: str) -> dict[str, Any]:
    """The schema of a field that stands for a parameter, or is ignored."""
    parameter = PARAMETERS.get(ALIASES.get(name, name))
    if parameter is None:
        return {"description": "Accepted and ignored."}
    described: dict[str, Any] = {"description": parameter.text}
    if parameter.kind:
        # `beta` may also be a text such as "1.5+1.5*T".
        described["type"] = [_TYPES[parameter.kind], *(["string"] if name == "beta" else []), "null"]
    if parameter.choices:
        described["enum"] = [*parameter.choices, None]
    return described

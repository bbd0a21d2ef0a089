"""Reads a request's body within the server's limits, and checks it against a schema."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from topw_deploy.serve.failures import INVALID, Failure, RequestError, invalid_request
from topw_deploy.serve.parameters import check_fields
from topw_deploy.serve.service import service_of

Body = TypeVar("Body", bound=BaseModel)
_LONGEST = 300  # characters of a message


async def read_body(request: Request, schema: type[Body]) -> Body:
    """Read the body and check it.

    Raises RequestError: 503, without reading the body, unless requests are accepted; 408 and 413 for a body beyond the
    limits; 400 for a body that is not JSON in UTF-8, is nested too deeply, or does not fit the schema.
    """
    service = service_of(request)
    service.check_ready()
    options = service.options
    data = await read_bytes(request, max_bytes=options.max_body, seconds=options.body_timeout)
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise refusal_of(error, schema.model_fields) from None


async def read_bytes(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """Read the body. Raises RequestError: 408 if it does not arrive within `seconds`, 413 if it has too many bytes."""
    try:
        return await asyncio.wait_for(_read(request, max_bytes), seconds)
    except TimeoutError:
        raise RequestError(
            Failure(408, INVALID, "request_timeout", f"the body did not arrive within {seconds:g} s; send it again.")
        ) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and len(stated) < 20 and int(stated) > max_bytes:
        raise _body_too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _body_too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _body_too_large(max_bytes: int) -> RequestError:
    message = f"the body has more than {max_bytes} bytes; send a shorter one."
    return invalid_request(message, code="body_too_large", status=413)


def refusal_of(error: ValidationError, known: Collection[str] = ()) -> RequestError:
    """The error to answer a body that does not fit its schema. It names the first wrong field.

    known: names of the fields of a schema that allows no others.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    message = str(found[0]["msg"])[:_LONGEST]
    if found[0]["type"] == "json_invalid":
        return invalid_request(f"the body is not valid JSON: {message}.", code="invalid_json")
    if found[0]["type"] == "extra_forbidden" and len(found[0]["loc"]) == 1:
        check_fields([str(found[0]["loc"][0])], known, {})
    param = _common_path([each["loc"] for each in found])
    if found[0]["type"] == "missing":
        return invalid_request(f"{param} is missing.", param, "missing_required_parameter")
    return invalid_request(f"{param or 'the body'}: {message}.", param, "invalid_type")


def _common_path(places: list[tuple[int | str, ...]]) -> str | None:
    """The path of the first wrong field. A value that fits no type of a union has one error for each of these types."""
    same = [place for place in places if place[:1] == places[0][:1]]
    path = [parts[0] for parts in zip(*same, strict=False) if len(set(parts)) == 1]
    return ".".join(map(str, path))[:_LONGEST] or None

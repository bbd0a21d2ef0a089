"""Reads a request's body within the limits, and checks it against a schema."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from topw_deploy.serve.failures import INVALID, Failure, RequestError, invalid
from topw_deploy.serve.parameters import check_fields

Body = TypeVar("Body", bound=BaseModel)
_LONGEST = 300  # characters of a message


async def read_body(request: Request, schema: type[Body], *, most: int, seconds: float) -> Body:
    """The checked body.

    most: maximum bytes. seconds: until all of it must have arrived.

    Raises RequestError: 408 and 413 for the limits, 400 for a body that is not JSON in UTF-8, is nested too deeply, or
    does not fit the schema.
    """
    return check(await read_bytes(request, most=most, seconds=seconds), schema)


async def read_bytes(request: Request, *, most: int, seconds: float) -> bytes:
    """The body as it is. Raises RequestError for the limits, as `read_body` does."""
    try:
        return await asyncio.wait_for(_read(request, most), seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise RequestError(
            Failure(408, INVALID, "request_timeout", f"the body did not arrive within {seconds:g} s; send it again.")
        ) from None


def check(data: bytes, schema: type[Body]) -> Body:
    """Parse and check JSON. Raises RequestError naming the first field that is wrong."""
    try:
        return schema.model_validate_json(data)
    except ValidationError as error:
        raise refusal(error, schema.model_fields) from None


async def _read(request: Request, most: int) -> bytes:
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and len(stated) < 20 and int(stated) > most:
        raise _too_large(most)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(most: int) -> RequestError:
    return invalid(f"the body has more than {most} bytes; send a shorter one.", code="body_too_large", status=413)


def refusal(error: ValidationError, known: Collection[str] = ()) -> RequestError:
    """The error for the first field that is wrong. known: the fields of a schema that allows no others."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    message = str(found[0]["msg"])[:_LONGEST]
    if found[0]["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {message}.", code="invalid_json")
    if found[0]["type"] == "extra_forbidden" and len(found[0]["loc"]) == 1:
        check_fields([str(found[0]["loc"][0])], known, {})
    param = _common_path([each["loc"] for each in found])
    if found[0]["type"] == "missing":
        return invalid(f"{param} is missing.", param, "missing_required_parameter")
    return invalid(f"{param or 'the body'}: {message}.", param, "invalid_type")


def _common_path(places: list[tuple[int | str, ...]]) -> str | None:
    """The path of the first wrong field. A value that fits no type of a union has one error for each of them."""
    same = [place for place in places if place[:1] == places[0][:1]]
    path = [parts[0] for parts in zip(*same, strict=False) if len(set(parts)) == 1]
    return ".".join(map(str, path))[:_LONGEST] or None

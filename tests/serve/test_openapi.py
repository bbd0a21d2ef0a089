"""/openapi.json describes the requests that the server answers, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.testclient import TestClient

from topw_deploy.serve.app import PAGE_ROUTES, ROUTES

from .conftest import NewClient
from .test_refusals import BODIES


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def test_every_endpoint_is_described(document: dict[str, Any], serve: NewClient, folder: Any) -> None:
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    routes = {(route.path.replace(":path", ""), "post" if "POST" in (route.methods or ()) else "get")
              for route in (*ROUTES, *PAGE_ROUTES)}  # fmt: skip
    assert (document["openapi"], described) == ("3.1.0", routes)
    without_page = serve(folder, page=False).get("/openapi.json").json()
    assert described - {(path, method) for path, methods in without_page["paths"].items() for method in methods} == {
        ("/", "get"), ("/topw/inspect", "post"),
    }  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_the_schema_of_a_body_takes_what_the_server_takes(
    client: TestClient, document: dict[str, Any], path: str
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    sampled = {} if "tokenize" in path else {"top_k": 5, "preset": None, "beta": "1.5+1.5*T", "stop": ["x"]}
    for others in ({}, sampled, {"no_such_field": 1}, {"seed": "one"}):
        body = {**BODIES[path], **others}
        assert validator.is_valid(body) == (client.post(path, json=body).status_code == 200), body

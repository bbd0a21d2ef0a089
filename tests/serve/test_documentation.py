"""The server's page names its endpoints, fields and metrics."""

from __future__ import annotations

import re
from pathlib import Path

from starlette.testclient import TestClient

from topw_deploy.serve.app import PAGE_ROUTES, ROUTES
from topw_deploy.serve.schemas import IGNORED, ChatRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "serve.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_page_names_every_endpoint() -> None:
    named = re.findall(r"`((?:GET|POST) /[^`]*)`", section("Endpoints"))
    assert set(named) == {
        f"{method} {route.path.replace('{name:path}', 'NAME')}"
        for route in (*ROUTES, *PAGE_ROUTES)
        for method in route.methods or ()
        if method != "HEAD"
    }


def test_the_page_names_every_field() -> None:
    names = set(re.findall(r"`(\w+)`", section("Fields")))
    assert names >= IGNORED
    assert ChatRequest.model_fields.keys() - {"model", "messages"} <= names


def test_clients_have_the_versions_that_the_tests_install() -> None:
    files = ("constraints.txt", "tests/serve_clients/requirements.txt", "tests/serve_clients/guidellm.txt")
    pinned = set(re.findall(r"^([\w-]+)==(\S+)", "\n".join((ROOT / name).read_text("utf-8") for name in files), re.M))
    clients = PAGE.split("- **Clients checked**")[1].split("\n\n")[0]
    rows = re.findall(r"([\w-]+) (\d+\.[\d.]*\d)", clients.replace(" and ", ", openai "))
    assert {name for name, _ in rows} == {"openai", "litellm", "langchain-openai", "llama-benchy", "guidellm"}
    assert set(rows) <= pinned


def test_the_page_names_every_metric(client: TestClient) -> None:
    served = set(
        re.findall(r"^# TYPE (topw:\w+) (?:counter|gauge|histogram)", client.get("/metrics").text, re.MULTILINE)
    )
    served = {name for name in served if not name.endswith("_created")}
    assert set(re.findall(r"`(topw:\w+)`", section("Metrics"))) == served

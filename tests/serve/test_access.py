"""KeyCheck, origins, request ids, logs and metrics."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import HELLO, NewClient, refused
from tests.support.toy_model import Toy, export
from topw_deploy.serve.app import PAGE_ROUTES, ROUTES
from topw_deploy.serve.metrics import PATHS
from topw_deploy.serve.server import LogFormatter

CHAT = "/v1/chat/completions"
ASK = {"messages": HELLO, "max_tokens": 3, "seed": 1}


def test_requests_need_one_of_the_keys(serve: NewClient, folder: Any) -> None:
    client = serve(folder, api_keys=("first", "second"))
    for header in (None, "Bearer third", "second", "Basic second", "Bearer", "Bearer second2", "Bearer s\xe9cond"):
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        response = client.post(CHAT, json=ASK, headers=headers)
        refused(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        assert client.post(CHAT, json=ASK, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert client.get("/health").status_code == client.get("/live").status_code == 200
    for path in ("/metrics", "/v1/models"):
        assert client.get(path).status_code == 401


def test_pages_of_named_origins_may_call(serve: NewClient, folder: Any) -> None:
    client = serve(folder, cors_origins=("https://a.example",), api_keys=("k",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = client.options(CHAT, headers={"Origin": "https://a.example", **asked})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = client.options(CHAT, headers={"Origin": "https://b.example", **asked})
    assert "access-control-allow-origin" not in other.headers
    plain = client.get("/health", headers={"Origin": "https://a.example"})
    assert plain.headers["access-control-expose-headers"] == "X-Request-Id"


def test_without_the_option_no_origin_is_allowed(client: TestClient) -> None:
    response = client.post(CHAT, json=ASK, headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a\tb", False)])
def test_a_request_id_of_the_client_is_kept_if_it_is_short_and_printable(
    client: TestClient, given: str, kept: bool
) -> None:
    response = client.post(CHAT, json=ASK, headers={"X-Request-Id": given})
    found = response.headers["x-request-id"]
    assert (found == given) is kept
    assert response.json()["id"] == f"chatcmpl-{found}"


def test_errors_have_request_ids_too(client: TestClient) -> None:
    assert client.post(CHAT, content=b"{", headers={"X-Request-Id": "bad"}).headers["x-request-id"] == "bad"
    assert client.get("/nowhere", headers={"X-Request-Id": "lost"}).headers["x-request-id"] == "lost"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The log, as it is written."""
    return [
        json.loads(LogFormatter(True).format(record)) for record in caplog.records if record.name == "topw_deploy.serve"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_of_the_log_has_counts_but_no_text(
    client: TestClient, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    secret = "s3cret"
    with caplog.at_level(logging.INFO, "topw_deploy.serve"):
        ask = {**ASK, "messages": [{"role": "user", "content": secret}], "stream": stream}
        client.post(CHAT, json=ask, headers={"X-Request-Id": "it"})
    (line,) = [each for each in lines(caplog) if each["event"] == "request"]
    assert (line["request_id"], line["status"], line["model"], line["path"]) == ("it", 200, "toy", CHAT)
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (11, 3, ["length"])
    assert line["stream"] is stream
    assert 0 < line["first_token_seconds"] < line["seconds"]
    assert secret not in caplog.text
    assert secret not in json.dumps(line)
    assert "status=200 " in LogFormatter(False).format(caplog.records[-1]) + " "


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b'{"messages": [{"role": "user", "content": "s3cret', 400),
        (CHAT, {"messages": [{"role": "s3cret", "content": "s3cret"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "s3cret", "text": "s3cret"}]}]}, 400),
        ("/v1/completions", {"prompt": "s3cret " * 40}, 400),
        ("/v1/completions", {"prompt": "s3cret", "stop": ["s3cret"], "response_format": "s3cret"}, 400),
        ("/v1/completions", {"prompt": "a", "s3cret": "s3cret"}, 400),
        ("/v1/completions", {"prompt": "a", "model": "s3cret"}, 404),
        ("/v1/responses", {"input": "s3cret", "max_output_tokens": 1}, 200),
        ("/tokenize", {"prompt": "s3cret"}, 200),
    ],
)
def test_the_log_has_no_text_of_other_requests(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: Any, status: int
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with caplog.at_level(logging.DEBUG, "topw_deploy.serve"):
        assert client.post(path, content=data).status_code == status
    (line,) = [each for each in lines(caplog) if each["event"] == "request"]
    assert line["status"] == status
    assert "s3cret" not in json.dumps(lines(caplog))


def test_prompts_and_answers_are_logged_on_request(
    serve: NewClient, folder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(folder, log_prompts=True)
    with caplog.at_level(logging.INFO, "topw_deploy.serve"):
        answer = client.post(CHAT, json=ASK).json()
    line = lines(caplog)[-1]
    assert line["prompt"] == "u:Hi;a:"
    assert line["answers"] == [answer["choices"][0]["message"]["content"]]


def test_the_log_says_why_the_page_cannot_show_the_choices(
    serve: NewClient, folder: Any, toy: Toy, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bare = export(tmp_path / "bare", toy, form="grouped")
    for page in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO, "topw_deploy.serve"):
            serve({"full": folder, "bare": bare}, page=page)
        hints = [each["model"] for each in lines(caplog) if "--with-logits" in each["event"]]
        assert hints == (["bare"] if page else [])


def test_an_unexpected_error_is_a_500_without_details(
    serve: NewClient, folder: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(folder)

    def fails(*_: Any) -> None:
        raise RuntimeError("the secret reason")

    monkeypatch.setattr("topw_deploy.runtime.TopWModel.apply_chat_template", fails)
    response = client.post(CHAT, json=ASK)
    assert "secret" not in refused(response, 500, "internal_error")
    assert response.headers["x-request-id"]
    assert "the secret reason" in caplog.text
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def metric(client: TestClient, name: str) -> float:
    """The sum of a metric's values."""
    text = client.get("/metrics").text
    found = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert found, name
    return sum(map(float, found))


def test_metrics_count_requests_tokens_and_seconds(serve: NewClient, folder: Any) -> None:
    client = serve(folder)
    client.post(CHAT, json={**ASK, "n": 2})
    client.post(CHAT, json={**ASK, "stream": True})
    wanted = {
        "topw:num_requests_running": 0,
        "topw:num_requests_waiting": 0,
        "topw:kv_cache_usage_perc": 0,
        "topw:prompt_tokens_total": 21,
        "topw:generation_tokens_total": 9,
        "topw:request_success_total": 3,
        "topw:time_to_first_token_seconds_count": 3,
        "topw:e2e_request_latency_seconds_count": 3,
        "topw:kept_tokens_count": 9,
        "topw:request_generation_tokens_sum": 9,
        "topw:request_queue_time_seconds_count": 3,
        "topw:request_prefill_time_seconds_count": 3,
        "topw:request_decode_time_seconds_count": 3,
    }
    assert {name: metric(client, name) for name in wanted} == wanted
    assert metric(client, "topw:inter_token_latency_seconds_count") >= 2
    assert metric(client, "topw:prefix_cache_hits_total") > 0
    assert 0 <= metric(client, "topw:certified_tokens_total") <= 9
    assert 'model_name="toy"' in client.get("/metrics").text
    parts = ("queue", "prefill", "decode")
    whole = sum(metric(client, f"topw:request_{part}_time_seconds_sum") for part in parts)
    assert whole == pytest.approx(metric(client, "topw:e2e_request_latency_seconds_sum"))


def test_answers_are_counted_by_path_and_status(serve: NewClient, folder: Any) -> None:
    client = serve(folder, api_keys=("k",), max_body=300, headers={"Authorization": "Bearer k"})
    client.post(CHAT, json=ASK)
    client.post(CHAT, content=b"{")
    client.post(CHAT, content=b" " * 400)
    client.post(CHAT, json=ASK, headers={"Authorization": "no"})
    client.get("/v1/models/a")
    client.get("/v1/models/org/b")
    client.get("/nowhere")
    client.post("/made/up")
    found = set(re.findall(r"^topw:http_responses_total(\{.*)", client.get("/metrics").text, re.MULTILINE))
    assert {each for each in found if "/health" not in each} == {
        '{path="/v1/chat/completions",status="200"} 1.0',
        '{path="/v1/chat/completions",status="400"} 1.0',
        '{path="/v1/chat/completions",status="413"} 1.0',
        '{path="/v1/chat/completions",status="401"} 1.0',
        '{path="/v1/models/NAME",status="404"} 2.0',
        '{path="other",status="404"} 2.0',
    }


def test_every_path_has_a_label() -> None:
    assert {route.path.replace("{name:path}", "NAME") for route in (*ROUTES, *PAGE_ROUTES)} == PATHS

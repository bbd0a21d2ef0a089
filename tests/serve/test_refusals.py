"""Requests that the server refuses, by accident or hostile: each gets an error object, and the server goes on."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import HELLO, NewClient, refused
from topw_deploy.runtime.parameters import ALIASES

CHAT, TEXT, RESPONSES, INSPECT = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/topw/inspect"


def post(client: TestClient, url: str = CHAT, **fields: Any) -> Any:
    prompt: dict[str, Any] = {"messages": HELLO} if url == CHAT else {"prompt": "ab"}
    return client.post(url, json={"model": "toy", "max_tokens": 2, **prompt, **fields})


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tempereture": 1.0}, "unknown_parameter", "tempereture"),
        ({"mirostat": 2}, "unknown_parameter", "mirostat"),
        ({"streamer": 1}, "unknown_parameter", "streamer"),
        ({"geom_metric": "l2"}, "unknown_parameter", "geom_metric"),
        ({"generation_config": {"seed": 1}}, "unknown_parameter", "generation_config"),
        ({"top_m": 5}, "unknown_parameter", "top_m"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"temperature": [1.0, 2.0]}, "invalid_value", "temperature"),
        ({"lam": -0.5}, "invalid_value", "lam"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"top_p": False}, "invalid_value", "top_p"),
        ({"rule": "unheard"}, "invalid_value", "rule"),
        ({"min_p": 0.1, "top_p": 0.5}, "invalid_value", None),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": {"a": 1}}, "invalid_value", "n"),
        ({"n": [2]}, "invalid_value", "n"),
        ({"n": 10**9}, "invalid_value", "n"),
        ({"n": 300}, "invalid_prompt", "n"),
        ({"max_length": 9}, "invalid_value", "max_tokens"),
        ({"seed": -1}, "invalid_value", "seed"),
        ({"seed": 1.5}, "invalid_value", "seed"),
        ({"max_completion_tokens": 3}, "invalid_value", "max_completion_tokens"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"logit_bias": {"999": 1.0}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "invalid_value", "logit_bias"),
        ({"response_format": {"type": "xml"}}, "invalid_grammar", "response_format"),
        ({"structured_outputs": {"regex": "("}}, "invalid_grammar", "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "invalid_grammar", "structured_outputs"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"max_time": 0}, "invalid_type", "max_time"),
        ({"model": 5}, "invalid_type", "model"),
        ({"cache_prompt": 0}, "invalid_type", "cache_prompt"),
    ],
)
def test_wrong_fields_are_refused_with_their_name_and_a_code(
    client: TestClient, url: str, fields: Any, code: str, param: str | None
) -> None:
    response = post(client, url, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    assert error["type"] == "invalid_request_error"


DEEP: Any = json.loads("[" * 150 + "1" + "]" * 150)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": ["x"]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": DEEP}}, "messages"),  # checked together with them
    ],
)
def test_wrong_fields_of_a_chat_are_refused_with_their_name(client: TestClient, fields: Any, param: str) -> None:
    response = post(client, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"null", "invalid_type"),
        (b"[]", "invalid_type"),
        (b'{"prompt": "\xff\xfe"}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
        (b'{"prompt": "a", "stop": ' + b"[" * 150 + b"]" * 150 + b"}", "invalid_value"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 400 + b"}", "invalid_value"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_value"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
        (b'{"prompt": "a"} {}', "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_json"),
        (b'{"prompt": "a\x00b"}', "invalid_json"),
        (b'{"prompt": "a", "\xc0\xae": 1}', "invalid_json"),
        (b'{"prompt": "a", "' + b"x" * 900_000 + b'": 1}', "unknown_parameter"),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, "invalid_json"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "invalid_value"),
        (b'{"prompt": "a", "max_tokens": -1}', "invalid_value"),
        (b'{"prompt": "a", "min_tokens": -9223372036854775809}', "invalid_value"),
        (b'{"prompt": "a", "logprobs": ' + b"9" * 400 + b"}", "invalid_value"),
        (b'{"prompt": "a", "max_time": 1e400}', "invalid_type"),
        (b'{"prompt": []}', "invalid_type"),
        (b'{"prompt": [[]]}', "invalid_type"),
        (b'{"prompt": [1, "a"]}', "invalid_type"),
        (b'{"prompt": [true]}', "invalid_type"),
        (b'{"prompt": [99999999999999999999999]}', "invalid_prompt"),
        (b'{"prompt": [-1]}', "invalid_prompt"),
        (b'{"model": "toy"}', "missing_required_parameter"),
    ],
)
def test_wrong_bodies_are_refused_with_a_code_and_do_no_harm(client: TestClient, body: bytes, code: str) -> None:
    response = client.post(TEXT, content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == code, response.text
    assert len(response.content) < 2000
    assert post(client, TEXT).status_code == 200


def test_a_body_above_the_limit_is_not_read(serve: NewClient, folder: Any) -> None:
    client = serve(folder, max_body=300)
    assert post(client).status_code == 200
    refused(client.post(TEXT, content=json.dumps({"prompt": "a" * 400})), 413, "body_too_large")
    chunks = (b" " * 100 for _ in range(100))  # without a length
    refused(client.post(TEXT, content=chunks), 413, "body_too_large")


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "br", "zstd", "x-gzip", "gzip, gzip"])
@pytest.mark.parametrize("url", [CHAT, TEXT, RESPONSES, INSPECT, "/tokenize", "/detokenize"])
def test_a_compressed_body_is_refused_with_415(client: TestClient, url: str, coding: str) -> None:
    body = gzip.compress(json.dumps(BODIES[url]).encode())
    response = client.post(url, content=body, headers={"Content-Encoding": coding})
    assert coding.lower() in refused(response, 415, "unsupported_encoding")
    assert response.headers["Accept-Encoding"] == "identity"
    assert client.post(url, json=BODIES[url], headers={"Content-Encoding": "Identity"}).status_code == 200


def test_a_slash_at_the_end_of_a_path_is_ignored(serve: NewClient, folder: Any) -> None:
    client = serve({"org/toy": folder}, api_keys=("key",))
    client.follow_redirects = False
    assert client.get("/health/").status_code == client.get("/live/").status_code == 200
    refused(client.get("/v1/models/"), 401, "invalid_api_key")
    client.headers["Authorization"] = "Bearer key"
    for url, body in BODIES.items():
        assert client.post(f"{url}/", json=body).status_code == 200
        assert client.post(f"{url}//", json=body).status_code == 200
    for url in ("/v1/models", "/v1/models/org/toy", "/metrics", "/"):
        assert client.get(f"{url}/").status_code == client.get(url).status_code == 200
    refused(client.get("/nowhere/"), 404, "not_found")
    refused(client.get(f"{TEXT}/"), 405, "method_not_allowed")


def test_a_prompt_beyond_the_context_is_refused(serve: NewClient, folder: Any) -> None:
    message = refused(post(serve(folder), TEXT, prompt=[5] * 97), 400, "context_length_exceeded", "prompt")
    assert message.startswith("this model's maximum context length is 96 tokens: ")  # litellm looks for these words


def test_unknown_models_paths_and_methods_are_refused(client: TestClient) -> None:
    assert "toy" in refused(post(client, model="gpt-9"), 404, "model_not_found", "model")
    refused(client.get("/v1/models/gpt-9"), 404, "model_not_found", "model")
    refused(client.get("/nowhere"), 404, "not_found")
    refused(client.get(CHAT), 405, "method_not_allowed")


def test_several_models_are_chosen_by_name(serve: NewClient, folder: Any) -> None:
    client = serve({"one": folder, "org/two": folder})
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["one", "org/two"]
    assert client.get("/v1/models/org/two").json()["max_model_len"] == 96
    assert post(client, model="org/two").json()["model"] == "org/two"
    refused(post(client, model=None), 400, "missing_required_parameter", "model")


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    TEXT: {"prompt": "ab", "max_tokens": 1},
    RESPONSES: {"input": "ab", "max_output_tokens": 1},
    INSPECT: {"prompt_token_ids": [5], "token_ids": [6], "position": 0},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [5]},
}


def known(message: str) -> set[str]:
    """The names that the message for an unknown field offers."""
    return set(message.partition("known are ")[2].rstrip(".").split(", "))


@pytest.mark.parametrize(
    ("url", "typed", "meant"),
    [
        (CHAT, "tempereture", "temperature"),
        (CHAT, "streem", "stream"),
        (CHAT, "tool", "tools"),
        (CHAT, "metdata", "metadata"),
        (TEXT, "echos", "echo"),
        (TEXT, "max_token", "max_tokens"),
        (RESPONSES, "instruction", "instructions"),
        (RESPONSES, "max_output_token", "max_output_tokens"),
        (INSPECT, "positon", "position"),
        ("/tokenize", "promt", "prompt"),
        ("/detokenize", "token", "tokens"),
    ],
)
def test_an_unknown_field_is_answered_with_the_nearest_one(
    client: TestClient, url: str, typed: str, meant: str
) -> None:
    message = refused(client.post(url, json={**BODIES[url], typed: 1}), 400, "unknown_parameter", typed)
    assert f"did you mean {meant}?" in message


@pytest.mark.parametrize("url", BODIES)
def test_the_names_offered_for_an_unknown_field_are_those_of_the_endpoint(client: TestClient, url: str) -> None:
    body = BODIES[url]
    assert client.post(url, json=body).status_code == 200
    names = known(refused(client.post(url, json={**body, "unheard": 1}), 400, "unknown_parameter", "unheard"))
    assert names >= body.keys()
    assert names.isdisjoint({"streamer", "stopping_criteria", "generation_config"})
    if url == CHAT:
        assert names >= {"temperature", "lam", "max_tokens", "n", "stop", "response_format", "tools", "stream"}
    for name in sorted(names):
        response = client.post(url, json={**body, name: "x"})
        code = (response.json().get("error") or {}).get("code")
        assert code not in ("unknown_parameter", "unsupported_parameter"), name


@pytest.mark.parametrize(
    ("url", "fields", "instead"),
    [
        (CHAT, {"prompt_logprobs": 0}, "/v1/completions with echo and logprobs"),
        (RESPONSES, {"prompt_logprobs": 0}, "/v1/completions with echo and logprobs"),
        (RESPONSES, {"max_tokens": 1}, "give max_output_tokens"),
        (RESPONSES, {"max_completion_tokens": 1}, "give max_output_tokens"),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "give text.format"),
        (RESPONSES, {"reasoning_effort": "low"}, "give reasoning.effort"),
        (RESPONSES, {"messages": HELLO}, "give input"),
        (RESPONSES, {"logprobs": True}, 'give "include": ["message.output_text.logprobs"]'),
        (RESPONSES, {"n": 2}, "one answer"),
        (RESPONSES, {"num_return_sequences": 2}, "one answer"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "send the whole conversation"),
        (INSPECT, {"stream": True}, "remove it"),
        (INSPECT, {"max_time": 1}, "remove it"),
        (INSPECT, {"structured_outputs": {"regex": "a"}}, "inspect an answer without it"),
        (INSPECT, {"response_format": {"type": "json_object"}}, "inspect an answer without it"),
    ],
)
def test_a_field_of_another_endpoint_is_refused_with_what_to_do(
    client: TestClient, url: str, fields: dict[str, Any], instead: str
) -> None:
    (name,) = fields
    message = refused(client.post(url, json={**BODIES[url], **fields}), 400, "unsupported_parameter", name)
    assert instead in message
    assert name not in known(refused(client.post(url, json={**BODIES[url], "y": 1}), 400, "unknown_parameter", "y"))


SAMPLING: list[dict[str, Any]] = [
    {"min_tokens": 1, "min_new_tokens": 2},
    {"stop": "a", "stop_strings": ["b"]},
    {"lam": 0.5, "lambda_geom": 0.6},
    {"warm_p": 0.5, "init_top_p": 0.6},
]
LENGTHS: list[dict[str, Any]] = [
    {"max_tokens": 2, "max_completion_tokens": 3},
    {"max_completion_tokens": 3, "max_tokens": 2},
    {"max_new_tokens": 2, "max_tokens": 3},
    {"n": 1, "num_return_sequences": 2},
]
OF_TEXT: list[dict[str, Any]] = [
    {"max_tokens": 2, "max_length": 40},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
]
OF_RESPONSES: list[dict[str, Any]] = [
    {"max_output_tokens": 2, "max_new_tokens": 3},
    {"max_output_tokens": 2, "max_length": 40},
    {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
]
TWICE = [
    *((url, fields) for url in (CHAT, TEXT) for fields in SAMPLING + LENGTHS + OF_TEXT),
    *((INSPECT, fields) for fields in SAMPLING + LENGTHS),
    *((RESPONSES, fields) for fields in SAMPLING + OF_RESPONSES),
]
NAMES = {*ALIASES, *ALIASES.values(), "max_output_tokens", "text.format", "max_length"}


@pytest.mark.parametrize(("url", "fields"), TWICE)
def test_contradicting_names_of_a_parameter_are_those_that_the_client_sent(
    client: TestClient, url: str, fields: dict[str, Any]
) -> None:
    body = {name: value for name, value in BODIES[url].items() if not name.startswith("max_")}
    error = client.post(url, json={**body, **fields}).json()["error"]
    sent = {"text.format" if name == "text" else name for name in fields}
    assert error["param"] in sent
    assert set(re.findall(r"[a-z_.]*[a-z_]", error["message"])) & NAMES == sent


@pytest.mark.parametrize("url", [CHAT, TEXT, RESPONSES, INSPECT])
def test_equal_values_under_two_names_of_a_parameter_are_accepted(client: TestClient, url: str) -> None:
    more = {"max_new_tokens": 1} if url == RESPONSES else {"max_tokens": 1, "max_completion_tokens": 1}
    assert client.post(url, json={**BODIES[url], **more, "stop": ["a"], "stop_strings": ["a"]}).status_code == 200


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        *((url, {name: -1}, name) for url in (CHAT, TEXT, INSPECT) for name in ("max_tokens", "max_completion_tokens")),
        *((url, {name: "x"}, name) for url in (CHAT, TEXT, INSPECT) for name in ("n", "min_tokens", "lambda_geom")),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"max_new_tokens": 0}, "max_new_tokens"),
        (RESPONSES, {"min_tokens": "x"}, "min_tokens"),
        (RESPONSES, {"stop": 5}, "stop"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        (
            RESPONSES,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
            "input.0.output.0.type",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_the_name_that_the_client_sent(
    client: TestClient, url: str, fields: dict[str, Any], param: str
) -> None:
    body = {name: value for name, value in BODIES[url].items() if not name.startswith("max_")}
    error = client.post(url, json={**body, "instructions": "a", **fields} if url == RESPONSES else {**body, **fields})
    assert error.json()["error"]["param"] == param
    assert param.removesuffix(".type") in error.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 0}])
def test_log_probabilities_of_a_prompt_are_refused_if_no_answer_would_show_them(
    client: TestClient, fields: dict[str, Any]
) -> None:
    response = client.post(TEXT, json={**BODIES[TEXT], "prompt_logprobs": 0, **fields})
    assert "add both" in refused(response, 400, "invalid_value", "prompt_logprobs")

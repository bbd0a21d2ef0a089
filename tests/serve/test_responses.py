"""/v1/responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseOutputText, ResponseTextDeltaEvent, ResponseTextDoneEvent
from starlette.testclient import TestClient

from tests.serve.conftest import HELLO, HOT, NewClient, refused

URL = "/v1/responses"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}]
LOGPROBS = ["message.output_text.logprobs"]


def ask(client: TestClient, given: Any = "Hi", **fields: Any) -> Any:
    return client.post(URL, json={"model": "toy", "input": given, **fields})


def events_of(response: Any) -> list[dict[str, Any]]:
    """The events, whose names and numbers are checked."""
    assert response.status_code == 200, response.text
    found = []
    for index, block in enumerate(block for block in response.text.split("\n\n") if block):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == index
        found.append(event)
    return found


def test_an_answer_is_the_one_of_a_chat(client: TestClient) -> None:
    chat = {"messages": HELLO, "max_tokens": 8, "seed": 5, **HOT}
    text = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    for one in ("Hi", given):
        answer = ask(client, one, max_output_tokens=8, seed=5, **HOT).json()
        (item,) = answer["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", text)
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 8, 15)


def test_a_stream_builds_the_same_response(client: TestClient) -> None:
    fields = {"max_output_tokens": 8, "seed": 5, **HOT}
    whole = ask(client, **fields).json()
    events = events_of(ask(client, stream=True, **fields))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    last = events[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["output_tokens"] == 8


def test_log_probabilities_are_those_of_a_chat(client: TestClient) -> None:
    fields = {"seed": 5, "top_logprobs": 2, **HOT}
    chat = {"messages": HELLO, "max_tokens": 8, "logprobs": True, **fields}
    wanted = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert (len(wanted), len(wanted[0]["top_logprobs"])) == (8, 2)
    answer = ask(client, max_output_tokens=8, include=LOGPROBS, **fields).json()
    part = answer["output"][0]["content"][0]
    assert (part["logprobs"], answer["top_logprobs"]) == (wanted, 2)
    events = events_of(ask(client, max_output_tokens=8, include=LOGPROBS, stream=True, **fields))
    assert events[-1]["response"]["output"][0]["content"] == [part]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each["token"] for each in done["logprobs"]] == [each["token"] for each in wanted]
    assert [each for delta in deltas for each in delta["logprobs"]] == done["logprobs"]
    for event in (*deltas, done):
        kind = ResponseTextDoneEvent if event is done else ResponseTextDeltaEvent
        assert kind.model_validate(event, strict=True).model_dump()["logprobs"] == event["logprobs"]
    typed = ResponseOutputText.model_validate(part, strict=True)
    assert [each.model_dump() for each in typed.logprobs or ()] == wanted
    plain = ask(client, max_output_tokens=8, seed=5, **HOT).json()["output"][0]["content"][0]
    assert plain == {**part, "logprobs": []}


def test_calls_are_items_of_their_own(caller: Any, serve: NewClient) -> None:
    client = serve(caller)
    answer = ask(client, tools=TOOLS).json()
    assert answer["status"] == "completed"
    text, call = answer["output"]
    assert (text["content"][0]["text"], call["type"], call["name"]) == ("So:", "function_call", "f")
    assert call["arguments"] == '{"n": 1}'
    events = events_of(ask(client, tools=TOOLS, stream=True))
    assert events[-1]["type"] == "response.completed"
    streamed = events[-1]["response"]["output"]
    assert [item["type"] for item in streamed] == ["message", "function_call"]
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.done"] == [0, 1]
    (delta,) = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert delta["item_id"] == streamed[1]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_call_are_not_those_of_the_text(caller: Any, serve: NewClient, stream: bool) -> None:
    answer = ask(serve(caller), tools=TOOLS, include=LOGPROBS, stream=stream)
    found = events_of(answer)[-1]["response"] if stream else answer.json()
    text, call = found["output"]
    assert [each["token"] for each in text["content"][0]["logprobs"]] == ["S", "o", ":"]
    assert call["type"] == "function_call"


def test_items_of_the_input_become_messages_of_the_chat(client: TestClient) -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs", "summary": []},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    answer = ask(client, items, instructions="Be.", max_output_tokens=1).json()
    assert answer["usage"]["input_tokens"] == len("s:Be.;u:Hi;a:;t:42;a:")


def test_an_answer_matches_the_schema_of_its_format(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    answer = ask(client, text={"format": {"type": "json_schema", "name": "it", "schema": schema}}).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"top_logprobs": "x"}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools.0.type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"temperature": -1}, "temperature"),
        ({"input": []}, "input"),
    ],
)
def test_a_wrong_field_is_refused_by_name(client: TestClient, fields: Any, param: str) -> None:
    response = ask(client, **fields) if "input" not in fields else client.post(URL, json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert "input" in refused(client.post(URL, json={}), 400, "missing_required_parameter", "input")

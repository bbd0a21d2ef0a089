"""An answer is the same whole and streamed: special tokens, reasoning, items, ends, bytes and offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import HELLO, TEMPLATE, TOOLS, NewClient, events_of
from tests.support.toy_model import BOS, EOS, PAD, SPECIAL, Toy, byte_ids, export

CALL = '<tool_call>{"name":"f"}</tool_call>'
SCRIPTS = {
    "special": [PAD, *byte_ids("So: "), PAD, *byte_ids(CALL), PAD, PAD],
    "calls": byte_ids(f"So: {CALL}{CALL}"),
    "reasoning": byte_ids("<think>hm</think>é日"),
}


@pytest.fixture
def clients(tmp_path: Path, serve: NewClient) -> TestClient:
    """A server of models that give SCRIPTS after HELLO."""
    for name, tokens in SCRIPTS.items():
        toy = Toy.script([*tokens, EOS], prompt_tokens=7)
        export(tmp_path / name, toy, form="grouped", with_logits=True, chat_template=TEMPLATE + "{# <tool_call> #}")
    return serve({name: tmp_path / name for name in SCRIPTS})


def whole_and_streamed(client: TestClient, **fields: Any) -> tuple[Any, Any, Any, Any]:
    """(content, reasoning, arguments of calls, finish_reason), which both answers have, and the log-probabilities."""
    body = {"messages": HELLO, "seed": 1, "temperature": 0, **fields}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    chunks = [c["choices"][0] for c in events_of(client.post("/v1/chat/completions", json={**body, "stream": True}))]
    deltas = [chunk["delta"] for chunk in chunks]

    def joined(name: str) -> str:
        return "".join(delta.get(name) or "" for delta in deltas)

    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    found = message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"]
    streamed = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert (joined("content"), joined("reasoning_content"), streamed, chunks[-1]["finish_reason"]) == found
    return found


def test_special_tokens_are_no_content_unless_they_are_asked_for(clients: TestClient) -> None:
    assert whole_and_streamed(clients, model="special", tools=TOOLS) == ("So:", "", ["{}"], "tool_calls")
    assert whole_and_streamed(clients, model="special") == ("So: " + CALL, "", [], "stop")
    shown, *_ = whole_and_streamed(clients, model="special", skip_special_tokens=False)
    assert shown.count("<pad>") == 4


def test_a_stop_string_with_a_special_token_stops(clients: TestClient) -> None:
    for stop, text in (("<pad>", ""), (" <pad><", "So:")):
        assert whole_and_streamed(clients, model="special", stop=stop) == (text, "", [], "stop")


def test_reasoning_is_apart_from_content_with_and_without_tools(clients: TestClient) -> None:
    for fields in ({}, {"tools": TOOLS}):
        assert whole_and_streamed(clients, model="reasoning", **fields) == ("é日", "hm", [], "stop")


@pytest.mark.parametrize(("length", "calls"), [(len("So: " + CALL), 1), (len("So: " + CALL) + 9, 1), (999, 2)])
def test_an_answer_that_was_cut_ends_by_length_also_after_a_call(clients: TestClient, length: int, calls: int) -> None:
    limit = {"max_tokens": length} if length < 99 else {}
    found = whole_and_streamed(clients, model="calls", tools=TOOLS, **limit)
    assert (len(found[2]), found[3]) == (calls, "tool_calls" if calls == 2 else "length")


@pytest.mark.parametrize("length", [len("So: " + CALL) + 9, None])
def test_a_responses_items_are_those_of_its_stream_and_the_cut_one_is_incomplete(
    clients: TestClient, length: int | None
) -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    body = {"model": "calls", "input": "Hi", "tools": tools, "temperature": 0, "max_output_tokens": length}
    whole = clients.post("/v1/responses", json=body).json()
    text = clients.post("/v1/responses", json={**body, "stream": True}).text
    streamed = events_of_responses(text)[-1]["response"]

    def brief(response: Any) -> list[tuple[str, str]]:
        return [(item["type"], item["status"]) for item in response["output"]]

    last = ("function_call", "completed") if length is None else ("message", "incomplete")
    assert brief(whole) == brief(streamed) == [("message", "completed"), ("function_call", "completed"), last]
    assert whole["status"] == ("completed" if length is None else "incomplete")


def events_of_responses(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


def test_the_bytes_of_tokens_are_those_of_the_text_and_offsets_count_its_characters(clients: TestClient) -> None:
    fields = {"model": "reasoning", "temperature": 0, "messages": HELLO, "logprobs": True}
    choice = clients.post("/v1/chat/completions", json=fields).json()["choices"][0]
    data = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    assert data.decode() == "<think>hm</think>é日"
    body = {"model": "reasoning", "temperature": 0, "prompt": "u:Hi;a:", "logprobs": 1, "max_tokens": 30}
    for echo in (False, True):
        choice = clients.post("/v1/completions", json={**body, "echo": echo}).json()["choices"][0]
        start = len("u:Hi;a:<think>hm</think>") if echo else len("<think>hm</think>")
        offsets = choice["logprobs"]["text_offset"][-6:]  # of five bytes and the end
        assert offsets == [start, start, start + 1, start + 1, start + 1, start + 2]
        assert choice["text"][start:] == "é日"


@pytest.mark.parametrize("prompt", ["a<pad>b", "<s>a</s>", "a <pad>", [BOS, *byte_ids("é"), PAD, *byte_ids("b")]])
@pytest.mark.parametrize("skip", [True, False])
def test_offsets_behind_an_echo_count_the_special_tokens_that_it_shows(
    clients: TestClient, prompt: Any, skip: bool
) -> None:
    body = {"model": "special", "prompt": prompt, "echo": True, "logprobs": 0, "skip_special_tokens": skip}
    choice = clients.post("/v1/completions", json={**body, "temperature": 0, "max_tokens": 9}).json()["choices"][0]
    text, scores = choice["text"], choice["logprobs"]
    placed = list(zip(scores["tokens"], scores["text_offset"], strict=True))
    assert all(text.startswith(token, place) for token, place in placed if token not in (*SPECIAL, "\ufffd"))
    shown = [place for token, place in placed if token in SPECIAL and text.startswith(token, place)]
    assert len(set(shown)) == sum(text.count(name) for name in SPECIAL)

"""/v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import CALL, HELLO, HOT, RENDERED, TOOLS, NewClient, events_of, refused
from tests.support.toy_model import Toy, export
from topw_deploy.runtime import TopWModel

URL = "/v1/chat/completions"


def ask(client: TestClient, **fields: Any) -> Any:
    return client.post(URL, json={"model": "toy", "messages": HELLO, **fields})


def expected(model: TopWModel, **parameters: Any) -> Any:
    return model.generate(RENDERED, add_special_tokens=False, **parameters)


def test_an_answer_is_the_one_of_generate(client: TestClient, model: TopWModel) -> None:
    answer = ask(client, max_tokens=12, seed=5, **HOT).json()
    result = expected(model, max_new_tokens=12, seed=5, **HOT)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["topw"]["seed"]) == ("length", None, 5)
    assert choice["topw"]["certified_share"] == pytest.approx(result.certified_share, abs=1e-6)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 12, 19)


@pytest.mark.parametrize(
    "parameters",
    [
        {"lam": 0.0, "beta": 5.0, "temperature": 2.0},
        {"preset": "lively"},
        {"rule": "top_p", "top_p": 0.5, "temperature": 3.0},
        {"min_p": 0.01, "temperature": 3.0},
        {"repetition_penalty": 1.5, "logit_bias": {"70": 9.0}, "temperature": 2.0},
    ],
)
def test_parameters_reach_the_engine_by_name(client: TestClient, model: TopWModel, parameters: dict[str, Any]) -> None:
    text = ask(client, max_tokens=16, seed=1, **parameters).json()["choices"][0]["message"]["content"]
    assert text == expected(model, max_new_tokens=16, seed=1, **parameters).text


def test_values_that_switch_a_rule_off_choose_no_rule(client: TestClient) -> None:
    plain = ask(client, max_tokens=16, seed=1, **HOT).json()["choices"][0]
    off = ask(client, max_tokens=16, seed=1, top_p=1, top_k=-1, min_p=0, presence_penalty=0, **HOT).json()["choices"][0]
    named = ask(client, max_tokens=16, seed=1, rule="top_p", top_p=1, **HOT).json()["choices"][0]
    assert plain["topw"]["rule"] == "top_w"
    assert off == plain
    assert named["topw"]["rule"] == "top_p"


def test_a_stream_has_the_same_text_and_the_usage(client: TestClient) -> None:
    fields = {"max_tokens": 12, "seed": 5, "n": 2, **HOT}
    whole = ask(client, **fields).json()
    chunks = events_of(ask(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in (0, 1):
        found = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert found[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in found)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in found] == [None] * (len(found) - 1) + ["length"]


def test_each_chunk_may_have_the_usage_so_far(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(ask(client, max_tokens=6, seed=5, stream=True, stream_options=options, **HOT))
    drawn = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert drawn == sorted(drawn)
    assert set(range(2, 7)) & set(drawn)
    assert drawn[-1] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {7}


def test_without_a_length_the_answer_may_fill_the_context(client: TestClient) -> None:
    answer = ask(client, seed=1).json()
    assert answer["usage"]["total_tokens"] == 96
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs_are_those_of_generate_also_in_a_stream(client: TestClient, model: TopWModel) -> None:
    fields = {"max_tokens": 6, "seed": 5, "logprobs": True, "top_logprobs": 2, **HOT}
    scores = expected(model, max_new_tokens=6, seed=5, logprobs=2, **HOT).token_logprobs
    content = ask(client, **fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx([score.logprob for score in scores], abs=1e-5)
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
    chunks = events_of(ask(client, stream=True, **fields))
    streamed = [
        entry for c in chunks if c["choices"][0]["logprobs"] for entry in c["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


def test_a_stop_string_ends_the_answer_and_is_named(client: TestClient, model: TopWModel) -> None:
    text = expected(model, max_new_tokens=20, seed=5, **HOT).text
    stop = text[6:8]
    choice = ask(client, max_completion_tokens=20, seed=5, stop=[stop], **HOT).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == text[: text.index(stop)]


def test_parts_of_content_and_more_variables_reach_the_chat_template(client: TestClient, model: TopWModel) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    fields = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "seed": 1, **HOT}
    assert ask(client, **fields).json()["choices"] == ask(client, max_tokens=4, seed=1, **HOT).json()["choices"]
    assert ask(client, **fields, reasoning_effort="low").json()["usage"]["prompt_tokens"] == 7 + len("low")
    kwargs = {"reasoning_effort": "high"}
    assert ask(client, **fields, chat_template_kwargs=kwargs).json()["usage"]["prompt_tokens"] == 7 + len("high")


def test_an_answer_matches_its_schema_or_choice_also_in_a_stream(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["xy"]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    for stream in (False, True):
        response = ask(client, response_format=wanted, stream=stream, seed=2, temperature=1.0)
        if stream:
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in events_of(response))
        else:
            text = response.json()["choices"][0]["message"]["content"]
            assert response.json()["choices"][0]["finish_reason"] == "stop"
        assert json.loads(text) == {"a": "xy"}
    text = ask(client, structured_outputs={"choice": ["yes", "no"]}).json()["choices"][0]["message"]["content"]
    assert text in ("yes", "no")


def test_a_call_is_separate_from_the_text_also_in_a_stream(caller: Any, serve: NewClient) -> None:
    client = serve(caller)
    choice = ask(client, tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"n": 1}'})
    chunks = [chunk["choices"][0] for chunk in events_of(ask(client, tools=TOOLS, stream=True))]
    (streamed,) = [one for chunk in chunks for one in chunk["delta"].get("tool_calls", ())]
    assert (streamed["index"], streamed["function"]) == (0, call["function"])
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "So:"
    assert chunks[-1]["finish_reason"] == "tool_calls"
    for plain in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(client, **plain).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("So: " + CALL, "stop")


def test_a_required_call_is_all_the_answer(caller: Any, serve: NewClient) -> None:
    client = serve(caller)
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80, "seed": 1}
        answer = ask(client, **fields).json()["choices"][0]["message"]
        assert not answer["content"]
        assert answer["tool_calls"][0]["function"]["name"] == "f"
    refused(ask(client, tool_choice="required"), 400, "invalid_value", "tool_choice")
    other = {"type": "function", "function": {"name": "g"}}
    assert "'g'" in refused(ask(client, tools=TOOLS, tool_choice=other), 400, "invalid_value", "tool_choice")


def test_tools_need_a_known_family(client: TestClient, caller: Any, folder: Any, serve: NewClient) -> None:
    assert "--tool-parser" in refused(ask(client, tools=TOOLS), 422, "tools_unsupported", "tools")
    assert ask(serve(folder, tool_parser="hermes"), tools=TOOLS, max_tokens=4).status_code == 200


def test_a_model_without_a_template_cannot_chat(serve: NewClient, toy: Toy, tmp_path: Any) -> None:
    client = serve(export(tmp_path / "secret" / "plain", toy, form="grouped"))
    message = refused(ask(client), 422, "unprocessable_prompt")
    assert "chat template" in message
    assert "secret" not in message


def test_fields_that_say_nothing_about_the_text_are_ignored(client: TestClient) -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stop": None, "foo": None}
    assert ask(client, max_tokens=2, max_completion_tokens=2, cache_prompt=True, **fields).status_code == 200


@pytest.mark.parametrize(
    "more", [{}, {"stream": True, "stream_options": {"include_usage": True}}, {"bad_words": ["x"]}]
)
def test_a_prompt_is_read_whole_on_request(client: TestClient, more: dict[str, Any]) -> None:
    fields = {"messages": [{"role": "user", "content": "a prompt of this test"}], "max_tokens": 1, "seed": 1, **more}
    cached = []
    for given in ({}, {"cache_prompt": True}, {"cache_prompt": False}, {}):
        response = client.post(URL, json={"model": "toy", **fields, **given})
        usage = (events_of(response)[-1] if "stream" in more else response.json())["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    whole = usage["prompt_tokens"] - 2
    assert cached[1:] == [whole, 0, whole]

"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import HELLO, HOT, RENDERED, events_of, refused
from tests.support.toy_model import byte_ids
from topw_deploy.runtime import TopWModel

URL = "/v1/completions"


def complete(client: TestClient, prompt: Any = "ab", **fields: Any) -> Any:
    return client.post(URL, json={"model": "toy", "prompt": prompt, **fields})


def test_several_prompts_and_samples_are_choices_in_order(client: TestClient, model: TopWModel) -> None:
    answer = complete(client, ["ab", "abc"], n=2, max_tokens=5, seed=3, **HOT).json()
    results = model.generate(["ab", "abc"], num_return_sequences=2, max_new_tokens=5, seed=3, **HOT)
    assert [choice["text"] for choice in answer["choices"]] == [result.text for result in results]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 20
    streamed = events_of(complete(client, ["ab", "abc"], n=2, max_tokens=5, seed=3, stream=True, **HOT))
    texts = ["", "", "", ""]
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [result.text for result in results]


def test_token_ids_are_prompts_too(client: TestClient) -> None:
    text = complete(client, "ab", seed=3, **HOT).json()["choices"]
    assert complete(client, byte_ids("ab"), seed=3, **HOT).json()["choices"] == text
    assert complete(client, [byte_ids("ab")], seed=3, **HOT).json()["choices"] == text


def test_without_a_length_a_completion_has_16_tokens(client: TestClient) -> None:
    assert complete(client).json()["usage"]["completion_tokens"] == 16


def test_a_prompt_that_fills_the_context_is_refused_or_answered_with_nothing(client: TestClient) -> None:
    assert complete(client, "a" * 96).json()["usage"]["completion_tokens"] == 0
    message = refused(complete(client, "a" * 97), 400, "context_length_exceeded", "prompt")
    assert "97 tokens" in message
    refused(complete(client, "a" * 5000), 400, "context_length_exceeded", "prompt")


def test_echo_with_logprobs_scores_the_prompt(client: TestClient, model: TopWModel) -> None:
    choice = complete(client, "abc", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    scores = model.generate("abc", prompt_logprobs=1, max_new_tokens=0).prompt_logprobs
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([one.logprob for one in scores[1:]], abs=1e-5)
    assert choice["logprobs"]["top_logprobs"][1]["b"] == choice["logprobs"]["token_logprobs"][1]
    both = complete(client, "abc", echo=True, logprobs=0, max_tokens=2).json()["choices"][0]
    assert len(both["logprobs"]["tokens"]) == 5
    assert "".join(both["logprobs"]["tokens"]).startswith("abc")


def test_echo_in_a_stream_begins_with_the_prompt(client: TestClient) -> None:
    whole = complete(client, "ab", echo=True, seed=1, max_tokens=4).json()["choices"][0]["text"]
    chunks = events_of(complete(client, "ab", echo=True, seed=1, max_tokens=4, stream=True))
    assert chunks[0]["choices"][0]["text"] == "ab"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    refused(complete(client, "ab", echo=True, logprobs=1, stream=True), 400, "invalid_value", "echo")


def test_logprobs_of_a_stream_have_the_offsets_of_the_text(client: TestClient) -> None:
    fields = {"seed": 4, "max_tokens": 8, "logprobs": 1, **HOT}
    whole = complete(client, **fields).json()["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in events_of(complete(client, stream=True, **fields))]
    joined = {name: [one for part in parts if part for one in part[name]] for name in whole}
    assert joined["tokens"] == whole["tokens"]
    assert joined["token_logprobs"] == whole["token_logprobs"]


def test_detokenize_inverts_tokenize(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["tokens"] == byte_ids("héllo")
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (6, 96, 6)
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    assert client.post("/tokenize", json={"messages": HELLO}).json()["tokens"] == byte_ids(RENDERED)


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_wrong_bodies_of_the_tokenizer_are_refused_by_field(
    client: TestClient, url: str, body: Any, param: str
) -> None:
    refused(client.post(url, json=body), 400, "invalid_value", param)

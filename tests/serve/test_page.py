"""The page at `/`, and what it asks the server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import HELLO, HOT, NewClient, events_of, new_client, refused, until_ready
from tests.support.toy_model import Toy, byte_ids, export
from topw_deploy.engine.batch import Batch
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import RuleParameters, TopWOptions, TopWParameters
from topw_deploy.sampling.rules import RULE_OF_VALUE
from topw_deploy.serve.inspect import place_in_plane
from topw_deploy.serve.page import SCRIPTS

INSPECT = "/topw/inspect"
LIVELY: dict[str, Any] = {"temperature": 1.5, "lam": 0.3, "beta": 2.0, "init_top_p": 0.6, "geom_scale": 1.0}


@pytest.fixture(scope="module")
def near() -> Toy:
    """A toy whose embeddings matter."""
    return Toy.random(5, options=TopWOptions(top_m=64, metric="mahalanobis"))


@pytest.fixture(scope="module")
def client(near: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = export(tmp_path_factory.mktemp("near") / "near", near, form="grouped", with_logits=True)
    with new_client({"near": folder}) as client:
        until_ready(client)
        yield client


def drawn(client: TestClient, **fields: Any) -> Any:
    """A completion with the ids of its tokens."""
    body = {"prompt": "ab", "return_token_ids": True, "seed": 3, "max_tokens": 12, **fields}
    return client.post("/v1/completions", json=body).json()["choices"][0]


def inspect(client: TestClient, choice: Any, position: int, **fields: Any) -> Any:
    body = {"prompt_token_ids": choice["prompt_token_ids"], "token_ids": choice["token_ids"], "position": position}
    response = client.post(INSPECT, json={**body, "seed": 3, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def set_of(answer: Any, name: str) -> Any:
    return next(each for each in answer["sets"] if each["name"] == name)


def test_every_drawn_token_is_in_the_set_that_the_reference_keeps(client: TestClient, near: Toy) -> None:
    choice = drawn(client, **LIVELY)
    expected = near.expect(byte_ids("ab"), 12, TopWParameters(**LIVELY), seed=3)
    moved = 0
    for position, row in enumerate(expected):
        answer = inspect(client, choice, position, **LIVELY)
        token = choice["token_ids"][position]
        shown = {each["id"]: each for each in answer["tokens"]}
        assert token == row.next_token
        assert "top_w" in shown[token]["sets"]
        assert shown[token]["drawn_with"] == pytest.approx(np.exp(row.logprob), rel=1e-5)
        assert {i for i, each in shown.items() if "top_w" in each["sets"]} == set(row.kept_ids.tolist()) & set(shown)
        assert set_of(answer, "top_w")["kept"] == row.kept == choice["topw"]["kept"][position]
        assert answer["certified"] is row.certified is choice["topw"]["certified"][position]
        difference = set_of(answer, "top_w")["kept"] - set_of(answer, "without_distances")["kept"]
        assert answer["added"] - answer["dropped"] == difference
        moved += answer["added"] + answer["dropped"]
    assert moved, "distances must change some set, or this test shows nothing"


def test_an_explanation_reads_the_last_token_only(
    serve: NewClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 tokens after 40, each in order: 12 positions. Reading all tokens before each would take 546."""
    read, positions = Batch.read, list[int]()

    def counting(batch: Batch, row: int, request: Any, start: int, end: int) -> int | None:
        positions.append(end - start)
        return read(batch, row, request, start, end)

    client = serve(folder)
    choice = drawn(client, prompt="a" * 40, **HOT)
    monkeypatch.setattr(Batch, "read", counting)
    for position in range(12):
        assert inspect(client, choice, position, **HOT)["token"]["kept"]
    assert (sum(positions), sum(40 + position for position in range(12))) == (12, 546)


def test_the_other_rules_keep_their_usual_sets(client: TestClient, near: Toy) -> None:
    choice = drawn(client, **LIVELY)
    answer = inspect(client, choice, 0, **LIVELY)
    for name, rule in (("top_p", {"top_p": 0.9}), ("min_p", {"min_p": 0.1}), ("top_h", {"top_h": 0.4})):
        row = near.expect(byte_ids("ab"), 1, TopWParameters(**LIVELY), rule=RuleParameters(**rule))[0]
        assert set_of(answer, name)["kept"] == row.kept
        assert {each["id"] for each in answer["tokens"] if name in each["sets"]} <= set(row.kept_ids.tolist())
    probabilities = [each["probability"] for each in answer["tokens"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len(probabilities) <= 60
    assert sum(probabilities) + answer["rest"]["probability"] == pytest.approx(1, abs=1e-4)


def test_the_rule_penalties_and_limits_of_the_request_count(client: TestClient) -> None:
    fields = {"rule": "min_p", "min_p": 0.02, "temperature": 2.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5,
              "allowed_token_ids": list(range(20, 120))}  # fmt: skip
    choice = drawn(client, **fields)
    for position in range(len(choice["token_ids"])):
        answer = inspect(client, choice, position, **fields)
        assert answer["token"]["kept"]
        assert set_of(answer, "chosen")["kept"] == choice["topw"]["kept"][position]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"position": 12}, "position"),
        ({"position": -1}, "position"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"prompt_token_ids": [300]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5] * 97}, "prompt_token_ids"),
        ({"lam": -1}, "lam"),
        ({"lambda": 1}, "lambda"),
    ],
)
def test_a_request_that_cannot_be_inspected_is_refused_by_field(client: TestClient, change: Any, param: str) -> None:
    body = {"prompt_token_ids": [5], "token_ids": [5] * 12, "position": 0, **change}
    response = client.post(INSPECT, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_export_without_logits_says_how_to_get_them(serve: NewClient, tmp_path: Path, toy: Toy) -> None:
    client = serve(export(tmp_path / "bare", toy, form="grouped"))
    response = client.post(INSPECT, json={"prompt_token_ids": [5], "token_ids": [5], "position": 0})
    assert "--with-logits" in refused(response, 422, "no_logits")
    abilities = client.get("/v1/models").json()["data"][0]["topw"]
    assert (abilities["logits"], abilities["chat"], abilities["metric"]) == (False, False, "uniform")
    assert abilities["presets"]["creative"]["beta"] == "1.5+1.5*T"
    assert abilities["penalties"] == {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    assert abilities["limits"] == {"min_tokens": 0, "no_repeat_ngram_size": 0, "stop": []}
    assert abilities["median_distance"] == 1, "that of the uniform metric"


def test_points_of_a_plane_keep_their_distances() -> None:
    points = np.random.default_rng(1).standard_normal((9, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    placed, share = place_in_plane(distances)
    assert np.linalg.norm(placed[:, None] - placed, axis=2) == pytest.approx(distances, abs=1e-9)
    assert share == pytest.approx(1)
    assert place_in_plane(np.zeros((4, 4)))[1] == 0
    assert place_in_plane(1 - np.eye(5))[1] == pytest.approx(2 / 4), "a simplex spreads equally in n - 1 dimensions"


def test_the_page_is_one_document_that_the_policy_lets_run(serve: NewClient, folder: Path) -> None:
    client = serve(folder, api_keys=("secret",))
    response = client.get("/")
    assert response.status_code == 200, "without a key"
    policy = response.headers["content-security-policy"]
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "/*" not in content
    assert all(f"{name}: [" in response.text for name in RULE_OF_VALUE), "a slider needs a range"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    runs = r"(inner|outer|Adjacent)HTML\b|document\.write|\beval\b|\bFunction\(|srcdoc"
    assert not re.search(runs, response.text), "texts are shown as text"
    assert set(re.findall(r"https?://[^\s\"']*", response.text)) == {"http://www.w3.org/2000/svg"}
    assert set(SCRIPTS) == {path.name for path in Path("src/topw_deploy/serve/page").glob("*.js")}
    for path, body in (("/v1/models", None), (INSPECT, {})):
        answer = client.get(path) if body is None else client.post(path, json=body)
        refused(answer, 401, "invalid_api_key")


def test_the_page_can_be_turned_off(serve: NewClient, folder: Path) -> None:
    client = serve(folder, page=False)
    refused(client.get("/"), 404, "not_found")
    refused(client.post(INSPECT, json={}), 404, "not_found")


def test_token_ids_come_with_the_text(model: TopWModel, client: TestClient) -> None:
    fields = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 9, "seed": 4, "return_token_ids": True, **HOT}
    for stop in ({}, {"stop": ["zzz", "qq"]}):
        whole = client.post("/v1/completions", json={**fields, **stop}).json()["choices"]
        for choice, prompt in zip(whole, ("ab", "ab", "c", "c"), strict=True):
            assert choice["prompt_token_ids"] == byte_ids(prompt)
            assert len(choice["token_ids"]) == len(choice["topw"]["kept"]) == len(choice["topw"]["logprobs"]) == 9
        found: dict[int, list[int]] = {}
        prompts: dict[int, list[list[int]]] = {}
        for chunk in events_of(client.post("/v1/completions", json={**fields, **stop, "stream": True})):
            (choice,) = chunk["choices"]
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
            if "prompt_token_ids" in choice:
                prompts.setdefault(choice["index"], []).append(choice["prompt_token_ids"])
        assert [found[index] for index in range(4)] == [choice["token_ids"] for choice in whole]
        assert [prompts[index] for index in range(4)] == [[choice["prompt_token_ids"]] for choice in whole]
    plain = client.post("/v1/completions", json={"prompt": "ab"}).json()["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & plain.keys()
    assert "kept" not in plain["topw"]


def test_token_ids_come_with_a_chat_too(serve: NewClient, folder: Path) -> None:
    client = serve(folder)
    fields = {"messages": HELLO, "max_tokens": 9, "seed": 4, "return_token_ids": True, **HOT}
    whole = client.post("/v1/chat/completions", json=fields).json()
    chunks = events_of(client.post("/v1/chat/completions", json={**fields, "stream": True}))
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == byte_ids("u:Hi;a:")
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == 9
    refused(client.post("/v1/responses", json={"input": "a", "return_token_ids": True}), 400, "unsupported_parameter",
            "return_token_ids")  # fmt: skip

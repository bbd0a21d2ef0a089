"""Random requests: the joined stream, the whole answer and the text of the tokens are the same.

The models emit special tokens, markers of calls and reasoning, parts of characters, and bytes that are no text.
"""

from __future__ import annotations

import codecs
import json
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.serve.conftest import TEMPLATE, new_client, until_ready
from tests.support.toy_model import BYTES, CONTEXT, EOS, FEATURES, PAD, SPECIAL, Toy, byte_ids, export
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.tools import Parsed, ToolCallParser
from topw_deploy.runtime.tools.formats import get_family

pytestmark = pytest.mark.slow

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALL = ('{"name":"f",', '"arguments":{"n":1}}')
SPLIT = (
    b"\xa9\xe6",
    b"\x97\xa5\xf0",
    b"\x9f\x98",
    b"x\xe6\x97",
    "日".encode(),
    b" a\n",
    *(part.encode() for part in CALL),
)
"""The bytes of tokens that begin or end inside a character, or hold several."""

CHARACTERS = [BYTES[byte_ids(bytes([byte]))[0] - len(SPECIAL)] for byte in range(256)]
"""GPT-2's characters, by byte."""

PHRASES = (
    ("So: ", "é日😀", EOS),
    ("<think>", "hm", "</think>", "é日"),
    ("\n", "<tool_call>", *CALL, "</tool_call>", "<tool_call>", *CALL, "</tool_call>", PAD, EOS),
    ("😀", PAD, "日", PAD, PAD, "x"),
    ("x", b"\xe6", PAD, b"\x97", b"\xa5", b"\xff", " ", b"\xf0\x9f", EOS),
    ("a<b", b"\xc3", b"x\xe6\x97", b"\xa5", b" a\n", "<tool_call>", "x"),
)
STOPS = ("\n", ": ", "é", "日", "😀", "日😀", "<pad>", "x<pad>", "<tool_call>", "</think>", "hm</", "}", "f", "na")
OVERLAPPING = ("na", '"name"', 'e":"f')  # one token completes all of them
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"regex": "(é|日|😀|x){1,6}"},
    {"choice": ["é日", "é日😀", "no"]},
    {"json": {"type": "object", "properties": {"a": {"enum": ["é", "日"]}}, "required": ["a"]}},
    {"grammar": 'start: "So: " <pad> ("日" | "<think>") <pad>'},
    {"json_object": True},
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
ENDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"ignore_eos": True},
    {"stop_token_ids": [PAD]},
    {"logit_bias": {str(EOS): 5}},
)
EDITS: tuple[dict[str, Any], ...] = (
    *({}, {}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 2}),
    *({"bad_words": ["x", "日"]}, {"suppress_tokens": [3, 4, 5]}, {"frequency_penalty": 0.5}),
)
RULES: tuple[dict[str, Any], ...] = ({}, {"lam": 0.3}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20}, {"rule": "none"})


def byte_level(special_markers: bool) -> Tokenizer:
    """GPT-2's tokens, with those of SPLIT, and with MARKERS as added tokens."""
    split = ["".join(CHARACTERS[byte] for byte in data) for data in SPLIT]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *BYTES, *split])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(marker, special=special_markers) for marker in MARKERS])
    return tokenizer


def pieces() -> Tokenizer:
    """SentencePiece's tokens with byte fallback, decoded like Llama 2: the first space of a text is stripped."""
    words = ["▁So", ":", "▁", "▁x", "x", "é", "日", "▁a", "\n", "hm", "<", "b", "f", *CALL]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


TOKENIZERS = {"special": byte_level(True), "plain": byte_level(False), "pieces": pieces()}


def ids_of(tokenizer: Tokenizer, part: str | bytes | int) -> list[int]:
    """The tokens of a part of a phrase, the longest first."""
    if isinstance(part, int):
        return [part]
    vocab = tokenizer.get_vocab()
    if isinstance(part, str) and part in MARKERS:
        return [vocab[part]]
    data = part.encode() if isinstance(part, str) else part
    if "<0x00>" in vocab:
        text = data.decode("utf-8", "ignore").replace(" ", "▁")
        return [vocab[text]] if text in vocab else [vocab[f"<0x{byte:02X}>"] for byte in data]
    if data in SPLIT:
        return [len(SPECIAL) + len(BYTES) + SPLIT.index(data)]
    return byte_ids(data)


def talker(tokenizer: Tokenizer) -> Toy:
    """A decoder that usually writes PHRASES, and sometimes another token."""
    rng, size = np.random.default_rng(5), tokenizer.get_vocab_size()
    follow = rng.integers(-16, 8, (size, size)).astype(np.float32)
    starts = [ids_of(tokenizer, phrase[0])[0] for phrase in PHRASES]
    for phrase in PHRASES:
        tokens = [token for part in phrase for token in ids_of(tokenizer, part)]
        for before, after in pairwise(tokens):
            follow[before, after] = 44
        follow[tokens[-1], starts] = 40
    follow[byte_ids(":")[0] if "<0x00>" not in tokenizer.get_vocab() else tokenizer.token_to_id(":"), starts] = 40
    return Toy(
        follow=follow,
        place=rng.integers(-6, 6, (CONTEXT, size)).astype(np.float32),
        features=rng.integers(-1, 2, (size, FEATURES)).astype(np.float32),
        mix=rng.integers(-1, 2, (FEATURES, size)).astype(np.float32),
        embeddings=rng.standard_normal((size, 8)).astype(np.float32),
    )


@dataclass
class World:
    """A server of the models, and the models."""

    client: TestClient
    models: dict[str, TopWModel]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("talkers")
    template = TEMPLATE + "{% if enable_thinking %}<think>{% endif %}{# <tool_call> #}"
    for name, tokenizer in TOKENIZERS.items():
        toy = talker(tokenizer)
        export(place / name, toy, form="grouped", with_logits=True, chat_template=template, tokenizer=tokenizer)
    with new_client({name: place / name for name in TOKENIZERS}) as client:
        until_ready(client)
        served = client.app.state.service.served()  # type: ignore[attr-defined]
        yield World(client, {each.name: each.model for each in served})


def random_request(seed: int) -> tuple[str, dict[str, Any]]:
    """Returns (path, body)."""
    rng = random.Random(seed)

    def maybe(share: float, value: dict[str, Any]) -> dict[str, Any]:
        return value if rng.random() < share else {}

    url = rng.choice((CHAT, CHAT, TEXT, TEXT, RESPONSES))
    stops = rng.choice((rng.sample(STOPS, rng.randint(1, 3)), OVERLAPPING))
    constrained = rng.random() < 0.25
    body: dict[str, Any] = {
        "model": rng.choice(list(TOKENIZERS)),
        "seed": rng.randrange(2**40),
        "temperature": rng.choice((0, 0.7, 1.0, 1.8)),
        **rng.choice(RULES),
        **rng.choice(EDITS),
        **rng.choice(ENDS),
        **maybe(0.4, {"stop": stops[0] if len(stops) == 1 else stops}),
        **maybe(0.2, {"min_tokens": rng.randint(1, 8)}),
        **maybe(0.3, {"skip_special_tokens": False}),
    }
    length, scored = rng.randint(1, 40), rng.random() < 0.5
    if url == RESPONSES:
        tools = maybe(0.6, {"tools": [{"type": "function", **FUNCTION}]})
        scores = {"include": ["message.output_text.logprobs"], "top_logprobs": rng.randint(0, 3)} if scored else {}
        body |= {"input": "Hi", "max_output_tokens": length, **tools, **scores}
    else:
        body |= {"max_tokens": length, "return_token_ids": True, **maybe(0.4, {"n": rng.randint(2, 3)})}
    if url == CHAT:
        tools = maybe(0.6, {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": True})
        if tools and not constrained:
            tools |= maybe(0.3, {"tool_choice": rng.choice(("required", "none"))})
        body |= {"messages": [{"role": "user", "content": rng.choice(("Hi", "é:"))}], **tools}
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)} if scored else {}
        body |= maybe(0.2, {"chat_template_kwargs": {"enable_thinking": True}})
    if url == TEXT:
        body |= {"prompt": rng.choice(("So:", "x", "日:", ["So:", "x"])), **({"logprobs": 1} if scored else {})}
        body |= {} if scored else maybe(0.2, {"echo": True})
    if constrained:
        body["structured_outputs"] = rng.choice(CONSTRAINTS)
    return url, body


def joined_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes of tokens: GPT-2's characters stand for bytes, SentencePiece's for themselves but `▁` and `<0x..>`."""
    added = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()}
    found = b""
    for token in ids:
        name = tokenizer.id_to_token(token)
        if token in added:
            found += name.encode()
        elif tokenizer is not TOKENIZERS["pieces"]:
            found += bytes(CHARACTERS.index(character) for character in name)
        else:
            found += bytes.fromhex(name[3:5]) if name.startswith("<0x") else name.replace("▁", " ").encode()
    return found


def text_of(
    body: dict[str, Any], prompt: Sequence[int], ids: Sequence[int], shown: Sequence[str]
) -> tuple[str, str | None]:
    """The text of the tokens `ids` after `prompt`, as the tokenizer's own library decodes them, cut at a stop string.

    shown: special tokens that are not hidden.

    Returns (the text, the stop string or None).
    """
    tokenizer = TOKENIZERS[body["model"]]
    special = {token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special}
    hidden = {token: name for token, name in special.items() if name not in shown}
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    ends = {*([] if body.get("ignore_eos") else [EOS]), *body.get("stop_token_ids", ())}

    def decoded(tokens: Sequence[int]) -> str:
        seen = [[token for token in part if token not in hidden] for part in (prompt, (*prompt, *tokens))]
        start, end = (joined_bytes(tokenizer, part) for part in seen)
        return end[len(start) :].decode("utf-8", "replace")

    ids = list(ids[:-1]) if ids and ids[-1] in ends else list(ids)
    whole = decoded(ids)
    named = {
        token: chr(0xE000 + place)
        for place, (token, name) in enumerate(hidden.items())
        if any(name in stop for stop in stops)
    }
    guarded = max(0, body.get("min_tokens", 0) - 1)  # the last of these tokens may complete a stop string
    free = len(decoded(ids[:guarded]).rstrip("\ufffd"))
    text, at = "", 0
    for place, token in enumerate(ids):
        if token in named and place >= guarded:
            before = len(decoded(ids[:place]).rstrip("\ufffd"))
            text, at = text + whole[at:before] + named[token], before
    text += whole[at:]

    def plain(marked: str) -> str:
        return "".join(character for character in marked if character not in named.values())

    found = []
    for stop in stops:
        marked = stop
        for token, mark in named.items():
            marked = marked.replace(hidden[token], mark)
        place = text.find(marked, free)
        found += [(place + len(marked), place, stop)] if place >= 0 else []
    if not found:
        return plain(text), None
    _, place, stop = min(found)
    return plain(text[:place]), stop


def shown_of(url: str, body: dict[str, Any]) -> Sequence[str]:
    """The special tokens that the text shows: all, none, or the markers that the answer is read for."""
    if body.get("skip_special_tokens") is False:
        return (*SPECIAL, *MARKERS)
    if url == TEXT:
        return ()
    return MARKERS if body.get("tools") and body.get("tool_choice") != "none" else MARKERS[2:]


def post(client: TestClient, url: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Returns (the whole answer, the data of the events of the stream); the same refusal twice has no answers."""
    whole = client.post(url, json=body)
    stream = client.post(url, json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in stream.text.split("\n") if line.startswith("data: {")]
    if whole.status_code != 200:
        error = stream.json() if stream.status_code != 200 else events[-1].get("response", events[-1])
        assert error["error"]["code"] == whole.json()["error"]["code"], (whole.text, error)
        return None, []
    assert stream.status_code == 200, stream.text
    return whole.json(), events


def joined(choices: Sequence[Any], name: str) -> Any:
    """A field of a choice, from its chunks."""
    values = [choice[name] for choice in choices if choice.get(name) is not None]
    if not values:
        return None
    if isinstance(values[0], dict):
        return {key: joined(values, key) for key in values[0]}
    return reduce(operator.add, values) if isinstance(values[0], (str, list)) else values[-1]


def check_choices(world: World, url: str, body: dict[str, Any]) -> int:
    """Check the choices of a completion or a chat. Returns their number."""
    whole, chunks = post(world.client, url, body)
    if whole is None:
        return 0
    count = len(whole["choices"])
    for choice in whole["choices"]:
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        for name in ("finish_reason", "stop_reason", "topw", "token_ids", "logprobs"):
            assert joined(own, name) == choice[name], name
        given = choice if url == TEXT else whole
        prompt, ids = given["prompt_token_ids"], choice["token_ids"]
        assert len(choice["topw"]["logprobs"]) == len(ids) <= body["max_tokens"]
        text, stop = text_of(body, prompt, ids, shown_of(url, body))
        assert choice["stop_reason"] == stop
        assert text_of(body, prompt, ids[:-1], shown_of(url, body))[1] is None  # it did not end too late
        if url == TEXT:
            prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
            start = prompts[choice["index"] * len(prompts) // count] if body.get("echo") else ""
            assert joined(own, "text") == choice["text"]
            assert choice["text"] == start + text
            check_offsets(body, choice, ids)
        else:
            check_message(body, choice, [each["delta"] for each in own], text)
            entries = None if choice["logprobs"] is None else choice["logprobs"]["content"]
            assert (entries is None) == (not body.get("logprobs"))
            if entries is not None:
                check_bytes(url, body, prompt, ids, entries)
    return count


def check_message(body: dict[str, Any], choice: Any, deltas: Sequence[Any], text: str) -> None:
    """Check that a message is the joined deltas, and what a parser finds in `text` at once."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    content, reasoning = message["content"] or "", message.get("reasoning_content") or ""
    assert (joined(deltas, "content") or "", joined(deltas, "reasoning_content") or "") == (content, reasoning)
    assert streamed == calls
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    opened = "<think>" if body.get("chat_template_kwargs") else ""
    parser = ToolCallParser(get_family("hermes"), tools, opened, reads_calls=bool(tools))
    found = Parsed.of([*parser.feed(text), *parser.finish()])
    assert (found.content or "", found.reasoning or "") == (content, reasoning)
    assert [{"name": call.name, "arguments": call.arguments} for call in found.tool_calls] == calls


def check_offsets(body: dict[str, Any], choice: Any, ids: Sequence[int]) -> None:
    """Check that the offsets of a completion's tokens grow with its text, one for each token."""
    scores = choice["logprobs"]
    assert (scores is None) == ("logprobs" not in body)
    if scores is not None:
        assert {len(values) for values in scores.values()} == {len(ids)}
        assert scores["text_offset"] == sorted(scores["text_offset"])


def check_bytes(
    url: str, body: dict[str, Any], prompt: Sequence[int], ids: Sequence[int], entries: Sequence[Any]
) -> None:
    """Check that the bytes of log-probabilities are those of the tokens' text, without stop strings."""
    assert len(entries) == len(ids)
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    body = {name: value for name, value in body.items() if name != "stop"}
    text, _ = text_of(body, prompt, ids, shown_of(url, body))
    assert codecs.decode(data, "utf-8", "replace") == text


def check_response(world: World, body: dict[str, Any]) -> int:
    """Check the items of a response. Returns 1 if there is an answer."""
    whole, events = post(world.client, RESPONSES, body)
    if whole is None:
        return 0
    final = events[-1]["response"]
    for answer in (whole, final):
        del answer["usage"]["input_tokens_details"]  # the second request finds the first one's states
        for item in answer["output"]:
            item.pop("id")
            item.pop("call_id", None)
    for name in ("output", "status", "incomplete_details", "usage"):
        assert whole[name] == final[name], name
    for index, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == index]
        deltas = [event["delta"] for event in own if event["type"].endswith(".delta")]
        if item["type"] == "function_call":
            assert "".join(deltas) == item["arguments"]
            continue
        (part,) = item["content"]
        assert "".join(deltas) == part["text"]
        if item["type"] == "message":
            scores = [one for event in own if event["type"].endswith("text.delta") for one in event["logprobs"]]
            brief = [(entry["token"], entry["logprob"]) for entry in part["logprobs"]]
            assert [(entry["token"], entry["logprob"]) for entry in scores] == brief[: len(scores)]
    own = ("input", "max_output_tokens", "tools", "include", "top_logprobs")
    chat = {name: value for name, value in body.items() if name not in own}
    chat |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": body["max_output_tokens"]}
    chat |= {"tools": [{"type": "function", "function": FUNCTION}]} if "tools" in body else {}
    message = world.client.post(CHAT, json=chat).json()["choices"][0]["message"]
    texts = {"message": "", "reasoning": ""}
    for item in whole["output"]:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    assert texts == {"message": message["content"] or "", "reasoning": message.get("reasoning_content") or ""}
    calls = [item["arguments"] for item in whole["output"] if item["type"] == "function_call"]
    assert calls == [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return 1


def check_model(world: World, body: dict[str, Any]) -> None:
    """Check that `generate` and `stream` give the text of a completion."""
    own = ("model", "prompt", "echo", "return_token_ids")
    parameters = {name: value for name, value in body.items() if name not in own}
    model = world.models[body["model"]]
    found = model.generate(body["prompt"], **parameters)
    results = found if isinstance(found, list) else [found]
    texts = [""] * len(results)
    for piece in model.stream(body["prompt"], **parameters):
        texts[piece.row] += piece.text
    assert texts == [result.text for result in results]
    echoless = {**body, "echo": False}
    answered = world.client.post(TEXT, json=echoless).json()["choices"]
    assert [choice["text"] for choice in answered] == texts
    assert [choice["token_ids"] for choice in answered] == [result.token_ids for result in results]


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 800), marks=pytest.mark.long)], ids=str)
def test_a_joined_stream_is_the_whole_answer_and_the_text_of_its_tokens(world: World, seeds: range) -> None:
    answers = 0
    for seed in seeds:
        url, body = random_request(seed)
        try:
            if url == RESPONSES:
                answers += check_response(world, body)
            else:
                count = check_choices(world, url, body)
                answers += count
                if url == TEXT and count:
                    check_model(world, body)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {url} {json.dumps(body, ensure_ascii=False)}")
            raise
    assert answers > len(seeds)

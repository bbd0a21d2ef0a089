"""Calls of OpenAI's own client to a server. Prints what it got as JSON. Runs in the clients' environment."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

HELLO: Any = [{"role": "user", "content": "Hi"}]
HOT: dict[str, Any] = {"max_tokens": 8, "seed": 5, "temperature": 2.5, "extra_body": {"lam": 0.2}}
PARAMETERS = {"type": "object", "properties": {}}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
STRICT: Any = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {**PARAMETERS, "required": []}}}
]


class It(BaseModel):
    """An answer."""

    a: Literal[1]


def error_of(client: openai.OpenAI, **arguments: Any) -> list[Any]:
    """The class, status, code and parameter of the error that a chat raises."""
    try:
        client.chat.completions.create(**{"model": "toy", "messages": HELLO, **arguments})
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return ["none", 200, None, None]


async def asynchronous(**given: Any) -> dict[str, Any]:
    """Four chats at once, a stream, a streamed call of a tool, and a structured answer."""
    async with openai.AsyncOpenAI(**given) as client:
        chats = client.chat.completions
        answers = await asyncio.gather(*(chats.create(model="toy", messages=HELLO, **HOT) for _ in range(4)))
        stream = await chats.create(model="toy", messages=HELLO, stream=True, **HOT)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        async with chats.stream(model="caller", messages=HELLO, tools=STRICT) as events:
            called = await events.get_final_completion()
        parsed = await chats.parse(model="toy", messages=HELLO, response_format=It)
    return {
        "async": [answer.choices[0].message.content for answer in answers],
        "async_stream": text,
        "async_call": called.choices[0].message.tool_calls[0].function.arguments,
        "async_structured": parsed.choices[0].message.parsed.a,
    }


def main(address: str) -> None:
    given: dict[str, Any] = {"base_url": address, "api_key": "sk-test", "max_retries": 0}
    client = openai.OpenAI(**given)
    chats, texts = client.chat.completions, client.completions
    answer = chats.create(model="toy", messages=HELLO, **HOT)
    options: Any = {"include_usage": True}
    chunks = list(chats.create(model="toy", messages=HELLO, stream=True, stream_options=options, **HOT))
    call = chats.create(model="caller", messages=HELLO, tools=TOOLS).choices[0]
    with chats.stream(model="caller", messages=HELLO, tools=STRICT) as events:
        kinds = {event.type for event in events}
        streamed = events.get_final_completion().choices[0].message.tool_calls[0]
    plain: dict[str, Any] = {"model": "demo", "prompt": "class A", "max_tokens": 6, "seed": 2}
    response: dict[str, Any] = {"model": "toy", "input": "Hi", "max_output_tokens": 6, "extra_body": {"seed": 2}}
    with client.responses.stream(**response) as stream:
        pieces = list(stream)
    deltas = [piece.delta for piece in pieces if piece.type == "response.output_text.delta"]
    found = {
        "models": sorted(each.id for each in client.models.list()),
        "chat": answer.choices[0].message.content,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens],
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "stream_usage": chunks[-1].usage.completion_tokens,
        "call": [call.finish_reason, call.message.tool_calls[0].function.arguments],
        "streamed_call": [streamed.function.name, streamed.function.arguments],
        "streamed_kinds": sorted(kinds),
        "structured": chats.parse(model="toy", messages=HELLO, response_format=It).choices[0].message.parsed.a,
        "text": texts.create(**plain).choices[0].text,
        "text_stream": "".join(part.choices[0].text for part in texts.create(stream=True, **plain)),
        "response": client.responses.create(**response).output_text,
        "response_stream": ["".join(deltas), pieces[-1].response.output_text],
        "response_ending": pieces[-1].type,
        "parsed_response": client.responses.parse(model="toy", input="Hi", text_format=It).output_parsed.a,
        "unknown_model": error_of(client, model="none"),
        "unknown_field": error_of(client, extra_body={"tempreature": 1}),
        "too_long": error_of(client, messages=[{"role": "user", "content": "x" * 200}]),
        "wrong_key": error_of(client.with_options(api_key="no")),
        **asyncio.run(asynchronous(**given)),
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])

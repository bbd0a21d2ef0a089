"""litellm's calls to a server. Prints what it got as JSON. Runs in the clients' environment: see test_clients.py."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

HELLO = [{"role": "user", "content": "Hi"}]
HOT: dict[str, Any] = {"max_tokens": 8, "seed": 5, "temperature": 2.5, "extra_body": {"lam": 0.2}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}


def error_of(**arguments: Any) -> list[Any]:
    """The class and status of the error that a call raises."""
    try:
        litellm.completion(**arguments)
    except Exception as error:  # noqa: BLE001  # reported
        return [type(error).__name__, getattr(error, "status_code", None)]
    return ["none", 200]


def main(address: str) -> None:
    given: dict[str, Any] = {"api_base": address, "api_key": "sk-test", "max_retries": 0}
    chat = {**given, "model": "openai/toy", "messages": HELLO}
    caller = {**given, "model": "openai/caller", "messages": HELLO, "tools": TOOLS}
    answer = litellm.completion(**chat, **HOT)
    chunks = list(litellm.completion(**chat, **HOT, stream=True, stream_options={"include_usage": True}))
    calls = litellm.completion(**caller, tool_choice="auto").choices[0]
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**caller, stream=True)), messages=HELLO)
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    structured = litellm.completion(**chat, response_format=wanted).choices[0].message.content
    text = {**given, "model": "text-completion-openai/demo", "prompt": "class A", "max_tokens": 6, "seed": 2}
    parts = list(litellm.text_completion(**text, stream=True))
    response = litellm.responses(model="openai/toy", input="Hi", max_output_tokens=16, **given)
    found = {
        "chat": answer.choices[0].message.content,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens],
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "stream_usage": next(chunk.usage.completion_tokens for chunk in reversed(chunks) if hasattr(chunk, "usage")),
        "async": asyncio.run(litellm.acompletion(**chat, **HOT)).choices[0].message.content,
        "call": [calls.finish_reason, calls.message.tool_calls[0].function.arguments],
        "streamed_call": streamed.choices[0].message.tool_calls[0].function.arguments,
        "structured": structured,
        "text": litellm.text_completion(**text).choices[0].text,
        "text_stream": "".join(part.choices[0].text or "" for part in parts),
        "response": response.usage.output_tokens,
        "unknown_model": error_of(**{**chat, "model": "openai/none"}),
        "unknown_field": error_of(**chat, extra_body={"tempreature": 1}),
        "too_long": error_of(**{**chat, "messages": [{"role": "user", "content": "x" * 200}]}),
        "no_tools": error_of(**{**caller, "model": "openai/toy"}),
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    main(sys.argv[1])

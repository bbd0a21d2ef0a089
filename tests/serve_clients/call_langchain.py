"""langchain-openai's calls to a server. Prints what it got as JSON. Runs in the clients' environment."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class It(BaseModel):
    """An answer."""

    a: Literal[1]


def f(n: int = 1) -> int:
    """A tool."""
    return n


def main(address: str) -> None:
    given: dict[str, Any] = {"base_url": address, "api_key": "sk-test", "max_retries": 0}
    hot: dict[str, Any] = {"max_tokens": 8, "seed": 5, "temperature": 2.5, "extra_body": {"lam": 0.2}}
    chat = ChatOpenAI(model="toy", stream_usage=True, **given, **hot)
    plain = ChatOpenAI(model="toy", **given)
    caller = ChatOpenAI(model="caller", **given).bind_tools([f])
    answer = chat.invoke("Hi")
    streamed = reduce(add, chat.stream("Hi"))
    called = caller.invoke("Hi")
    call = called.tool_calls[0]
    talk = [
        SystemMessage("s"),
        HumanMessage("Hi"),
        AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}]),
        ToolMessage("1", tool_call_id="1"),
    ]
    forced = ChatOpenAI(model="caller", **given).with_structured_output(It, method="function_calling")
    texts = OpenAI(model="demo", max_tokens=6, seed=2, temperature=0, **given)
    found = {
        "chat": answer.content,
        "usage": [answer.usage_metadata[f"{kind}_tokens"] for kind in ("input", "output", "total")],
        "stream": streamed.content,
        "stream_usage": streamed.usage_metadata["output_tokens"],
        "async": asyncio.run(chat.ainvoke("Hi")).content,
        "call": [called.response_metadata["finish_reason"], call["name"], call["args"]],
        "streamed_call": [reduce(add, caller.stream("Hi")).tool_calls[0][key] for key in ("name", "args")],
        "talk": chat.invoke(talk).usage_metadata["input_tokens"],
        "structured": plain.with_structured_output(It, method="json_schema").invoke("Hi").a,
        "forced": forced.invoke("Hi").a,
        "text": texts.invoke("class A"),
        "text_stream": "".join(texts.stream("class A")),
        "texts": [[one.text for one in many] for many in texts.generate(["class A", "def f"]).generations],
        "response": ChatOpenAI(model="toy", use_responses_api=True, **given, max_tokens=8)
        .invoke("Hi")
        .usage_metadata["output_tokens"],
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])

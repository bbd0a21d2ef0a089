"""The output of /v1/responses: its items, and the events of a stream that build them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topw_deploy.runtime import TokenLogprob
from topw_deploy.runtime.tools import Content, Reasoning
from topw_deploy.runtime.tools.parser import Event, ToolCall
from topw_deploy.serve.choices import text_logprobs

NamedEvent = tuple[str, dict[str, Any]]
"""(type of an event, its other fields)"""


class OutputItems:
    """Builds the items of one answer. At most one item, a message or reasoning, is open.

    run_id: part of the items' ids.
    done: finished items, in order.
    """

    def __init__(self, run_id: str) -> None:
        self.done: list[dict[str, Any]] = []
        self._id = run_id
        self._kind: type[Content] | type[Reasoning] | None = None  # of the open item, if there is one
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []  # of the open message's tokens

    @property
    def calls(self) -> int:
        """Number of finished tool calls."""
        return sum(item["type"] == "function_call" for item in self.done)

    def add(self, part: Event, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[NamedEvent]:
        """Add text, reasoning or a call. Yields the events for the client.

        logprobs: log-probabilities of a message's new tokens.
        """
        if isinstance(part, ToolCall):
            yield from self.close("completed")
            yield from self._add_call(part)
            return
        if self._kind is not type(part):
            yield from self.close("completed")
            self._kind = type(part)
            yield from self._open()
        self._text.append(part.text)
        new = text_logprobs(logprobs)
        self._logprobs += new
        kind, field = self._text_kind(new)
        yield f"response.{kind}.delta", {**self._place(), "delta": part.text, **field}

    def close(self, status: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[NamedEvent]:
        """Finish the open item, if there is one. Yields the events for the client.

        status: "completed" or "incomplete".
        logprobs: log-probabilities of tokens after the text of a message, such as EOS.
        """
        if self._kind is None:
            return
        if self._kind is Content:
            self._logprobs += text_logprobs(logprobs)
        text, part, place = "".join(self._text), self._part("".join(self._text)), self._place()
        kind, field = self._text_kind(self._logprobs)
        yield f"response.{kind}.done", {**place, "text": text, **field}
        yield "response.content_part.done", {**place, "part": part}
        item = self._item(status, [part])
        yield "response.output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._kind, self._text, self._logprobs = None, [], []

    def _text_kind(self, entries: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
        """Returns (the open item's name in the types of events, the field of its tokens' log-probabilities)."""
        if self._kind is Reasoning:
            return "reasoning_text", {}
        return "output_text", {"logprobs": [_without_bytes(entry) for entry in entries]}

    def _open(self) -> Iterator[NamedEvent]:
        item = self._item("in_progress", [])
        yield "response.output_item.added", {"output_index": len(self.done), "item": item}
        yield "response.content_part.added", {**self._place(), "part": self._part("")}

    def _add_call(self, call: ToolCall) -> Iterator[NamedEvent]:
        item = {
            "type": "function_call",
            "id": self._item_id("fc"),
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        place = {"item_id": item["id"], "output_index": len(self.done)}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield "response.output_item.added", {"output_index": len(self.done), "item": begun}
        yield "response.function_call_arguments.delta", {**place, "delta": call.arguments}
        done = {**place, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        if self._kind is Reasoning:
            base = {"type": "reasoning", "id": self._item_id("rs"), "summary": []}
            return {**base, "content": content, "status": status}
        base = {"type": "message", "id": self._item_id("msg"), "role": "assistant"}
        return {**base, "content": content, "status": status}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _place(self) -> dict[str, Any]:
        prefix = "rs" if self._kind is Reasoning else "msg"
        return {"item_id": self._item_id(prefix), "output_index": len(self.done), "content_index": 0}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self.done)}"


def _without_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a log-probability as events have it."""
    best = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": best}

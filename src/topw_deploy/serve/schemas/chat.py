"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from topw_deploy.serve.failures import invalid
from topw_deploy.serve.parameters import MOST_LOGPROBS
from topw_deploy.serve.schemas.common import Generating


class Part(BaseModel):
    """A part of a message's content. Only text is understood."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a chat. Its other fields reach the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def as_dict(self, where: str) -> dict[str, Any]:
        """The message for a template. where: its place in the request, for messages."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        role = "system" if self.role == "developer" else self.role  # templates know only the older name
        return {**extra, "role": role, "content": self._text(where), **calls}

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise invalid(
                    f"{where}.content.{index} is of type {part.type[:40]!r}, but this server takes text only.",
                    f"{where}.content.{index}.type",
                )
        return "".join(part.text or "" for part in self.content)


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """`{"type": "function", "function": {"name": ...}}`"""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(Generating):
    """The body of /v1/chat/completions.

    chat_template_kwargs: more variables of the chat template, such as `enable_thinking`.
    reasoning_effort: a variable of the chat template.
    return_token_ids: whether the answer has its token ids and the prompt's.
    """

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, strict=True)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_ids: StrictBool | None = None

"""The requests of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.parameters import FIELDS, MOST_LOGPROBS, check_fields, read_parameters

NO_PROMPT_LOGPROBS = "is not available here; send the prompt to /v1/completions with echo and logprobs"


class StreamOptions(BaseModel):
    """`stream_options`. Other fields, such as `include_obfuscation`, are ignored.

    include_usage: whether a last chunk has the usage.
    continuous_usage_stats: whether every chunk has the usage so far.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class GenerationRequest(BaseModel):
    """A request for text.

    refused: fields of other endpoints -> the end of the error message.
    model: name of the model; may be absent if only one model is served.
    cache_prompt: whether the states of an earlier prompt with the same beginning may be reused; default true.
    max_time: seconds, including the wait in the queue; the server's own limit also applies.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    refused: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    cache_prompt: StrictBool | None = None
    max_time: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def others(self) -> Mapping[str, Any]:
        """The fields that the schema does not declare."""
        return self.model_extra or {}

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        """The names of the fields that a request may have."""
        return (frozenset(cls.model_fields) | FIELDS) - cls.refused.keys()

    def check_fields(self) -> None:
        """Raises RequestError for a field that is unknown or belongs to another endpoint."""
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        given = [name for name, value in {**declared, **self.others}.items() if value is not None]
        check_fields(given, self.known_fields(), self.refused)

    def parameters(self) -> dict[str, Any]:
        """The engine's parameters. Raises RequestError for a wrong field, and for `stream_options` without `stream`."""
        self.check_fields()
        if self.stream_options is not None and not self.stream:
            raise invalid_request('stream_options is given without stream; add "stream": true.', "stream_options")
        return read_parameters(self.others)


Texts = Annotated[list[StrictStr], Field(min_length=1)]
Ids = Annotated[list[StrictInt], Field(min_length=1)]
Batch = Annotated[list[Ids], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions.

    prompt: a text, token ids, or a list of either.
    echo: whether the answer begins with the prompt and, with `logprobs`, its log-probabilities.
    return_token_ids: whether the answer has its token ids and the prompt's.
    """

    prompt: StrictStr | Texts | Ids | Batch
    echo: StrictBool | None = None
    return_token_ids: StrictBool | None = None


class Part(BaseModel):
    """A part of a message's content. `Message.as_dict` refuses parts that are not text."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a chat. Fields that are not declared reach the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def as_dict(self, where: str) -> dict[str, Any]:
        """The message as the chat template takes it. Raises RequestError for content that is not text.

        where: the message's place in the request, for the error message.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        role = (
            "system" if self.role == "developer" else self.role
        )  # templates know only OpenAI's older name of the role
        return {**extra, "role": role, "content": self._text(where), **calls}

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise invalid_request(
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


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions.

    chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
    reasoning_effort: a variable of the chat template.
    return_token_ids: whether the answer has its token ids and the prompt's.
    """

    refused: ClassVar[Mapping[str, str]] = {"prompt_logprobs": NO_PROMPT_LOGPROBS}

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, strict=True)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_ids: StrictBool | None = None

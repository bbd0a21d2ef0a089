"""The fields of requests.

A field that a schema does not declare is a parameter of `TopWModel.generate`, under its own name or its name in
OpenAI's API or vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from topw_deploy.runtime.parameters import ALIASES, PARAMETERS, names_in_json, unknown_parameter_error
from topw_deploy.runtime.prepare import has_no_effect
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.serve.failures import RequestError
from topw_deploy.text import short_repr

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
})  # fmt: skip
"""Fields of OpenAI's API that say nothing about the text. They are accepted and ignored."""

FIELDS = names_in_json() | IGNORED
"""The undeclared fields that a request may have, unless its schema refuses them."""

MOST_LOGPROBS = 20
"""Maximum number of alternatives per token, as in OpenAI's API."""

_LONGEST_NAME = 64  # characters of an unknown field's name that the answer repeats
_MOST_ENTRIES = 1024  # of each parameter in _EACH_TOKEN, whose entries cost time at every token of the batch
_EACH_TOKEN = ("stop_strings", "bad_words", "bad_words_ids", "logit_bias", "suppress_tokens")


def check_fields(given: Iterable[str], known: Collection[str], refused: Mapping[str, str]) -> None:
    """Check the names of a request's fields.

    known: names that the endpoint knows.
    refused: names of other endpoints' fields -> the reason, and what to do.

    Raises RequestError naming the first field that is refused or unknown.
    """
    for name in given:
        if name in refused:
            raise RequestError(f"{name} {refused[name]}.", name, "unsupported_parameter")
        if name not in known:
            message = str(unknown_parameter_error(name, known))
            if len(name) > _LONGEST_NAME:
                message = f"unknown parameter {name[:_LONGEST_NAME]!r}..., of {len(name)} characters; remove it."
            raise RequestError(message, name[:_LONGEST_NAME], "unknown_parameter")


def read_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's parameters in `fields`, under the engine's names. The fields' names must have been checked.

    A field that is null counts as absent. A value that switches another rule off, such as `top_p` 1 or `top_k` -1,
    chooses no rule unless `rule` is given, because many clients always send such values.

    Some clients send equal values under two names of a parameter, such as `max_tokens` and `max_completion_tokens`.

    Raises RequestError naming a field that contradicts another one, is too long, or has one value per prompt.
    """
    given = {name: value for name, value in fields.items() if value is not None and name not in IGNORED}
    found: dict[str, Any] = {}
    first: dict[str, str] = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        check_same(first.setdefault(ours, name), name, given)
        if PARAMETERS[ours].lists_values(value):
            raise RequestError(f"{name} is a list of values, but a request takes one value.", name)
        if ours in _EACH_TOKEN and isinstance(value, (list, dict)) and len(value) > _MOST_ENTRIES:
            raise RequestError(f"{name} has {len(value)} entries, but may have at most {_MOST_ENTRIES}.", name)
        if ours in ("logprobs", "prompt_logprobs") and isinstance(value, int) and value > MOST_LOGPROBS:
            raise RequestError(f"{name} is {short_repr(value)}, but may be at most {MOST_LOGPROBS}.", name)
        is_off = ours in RULE_PARAMETER_NAMES and not isinstance(value, bool) and has_no_effect(ours, value)
        if "rule" in given or not is_off:
            found[ours] = value
    return found


def check_same(first: str, second: str, values: Mapping[str, Any]) -> None:
    """Raises RequestError if two names of the same parameter have different values."""
    if values[first] != values[second]:
        message = f"{first} and {second} are two names of one parameter, but have different values; give one of them."
        raise RequestError(message, second)


NO_PROMPT_LOGPROBS = "is not available here; send the prompt to /v1/completions with echo and logprobs"


class StreamOptions(BaseModel):
    """`stream_options`. Other fields, such as `include_obfuscation`, are ignored.

    include_usage: whether a last chunk has the usage.
    continuous_usage_stats: whether every chunk has the usage so far.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class ModelRequest(BaseModel):
    """A request to a model, which may be absent if only one is served."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = None

    @property
    def others(self) -> Mapping[str, Any]:
        """The fields that the schema does not declare."""
        return self.model_extra or {}


class GenerationRequest(ModelRequest):
    """A request for text.

    refused: fields of other endpoints -> the end of the error message.
    own_names: parameters of the engine -> the declared field that states them here.
    cache_prompt: whether the states of an earlier prompt with the same beginning may be reused; default true.
    max_time: seconds, including the wait in the queue; the server's own limit also applies.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    refused: ClassVar[Mapping[str, str]] = {}
    own_names: ClassVar[Mapping[str, str]] = {}

    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    cache_prompt: StrictBool | None = None
    max_time: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    def check_fields(self) -> None:
        """Raises RequestError for a field that is unknown or belongs to another endpoint."""
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        given = [name for name, value in {**declared, **self.others}.items() if value is not None]
        known = (type(self).model_fields.keys() | FIELDS) - self.refused.keys()
        check_fields(given, known, self.refused)

    def parameters(self) -> dict[str, Any]:
        """The engine's parameters. Raises RequestError for a wrong field, and for `stream_options` without `stream`."""
        self.check_fields()
        if self.stream_options is not None and not self.stream:
            raise RequestError('stream_options is given without stream; add "stream": true.', "stream_options")
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
    """A part of a message's content. `text_of` refuses parts that are not text."""

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
        # Templates know only OpenAI's older name of the role.
        role = "system" if self.role == "developer" else self.role
        return {**extra, "role": role, "content": text_of(self.content, f"{where}.content"), **calls}


def text_of(content: str | list[Part] | None, where: str) -> str:
    """The text of a content. Raises RequestError, naming the place `where` in the request, for parts of other types."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise RequestError(
                f"{where}.{index} is of type {part.type[:40]!r}, but this server takes text only.",
                f"{where}.{index}.type",
            )
    return "".join(part.text or "" for part in content)


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


_ONLY_FOR_CHATS = "belongs to /v1/chat/completions; {}"
_WITH_LOGPROBS = '"include": ["message.output_text.logprobs"]'
_ONE_ANSWER = "is not available, because a response has one answer; remove it"
_NOT_STORED = "is not available, because nothing is stored; send the whole conversation as input"


class FunctionTool(BaseModel):
    """A tool. Unlike a chat's tool, it has no nested `function`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolName(BaseModel):
    """`{"type": "function", "name": ...}`"""

    type: Literal["function"]
    name: str


class InputItem(BaseModel):
    """An item of the input: a message, a tool call, the result of a call, or the model's reasoning."""

    model_config = ConfigDict(extra="allow")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class TextFormat(BaseModel):
    """`text.format`: what the text of the answer must match."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(BaseModel):
    """`text`. Other fields, such as `verbosity`, are ignored."""

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    """`reasoning`. Other fields, such as `summary`, are ignored."""

    effort: str | None = None


class ResponsesRequest(GenerationRequest):
    """The body of /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = {
        "messages": _ONLY_FOR_CHATS.format("give input"),
        "max_tokens": _ONLY_FOR_CHATS.format("give max_output_tokens"),
        "max_completion_tokens": _ONLY_FOR_CHATS.format("give max_output_tokens"),
        "response_format": _ONLY_FOR_CHATS.format("give text.format"),
        "reasoning_effort": _ONLY_FOR_CHATS.format("give reasoning.effort"),
        "logprobs": _ONLY_FOR_CHATS.format(f"give {_WITH_LOGPROBS}"),
        "return_token_ids": _ONLY_FOR_CHATS.format("remove it"),
        "prompt_logprobs": NO_PROMPT_LOGPROBS,
        "n": _ONE_ANSWER,
        "num_return_sequences": _ONE_ANSWER,
        "previous_response_id": _NOT_STORED,
        "conversation": _NOT_STORED,
    }
    own_names: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_output_tokens",
        "structured_outputs": "text.format",
        "logprobs": "include",
    }

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, strict=True)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, strict=True)
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """The chat request with the same answer. Raises RequestError for a wrong field."""
        self.check_fields()
        if self.top_logprobs and not self.include:
            raise RequestError(f"top_logprobs is given without include; add {_WITH_LOGPROBS}.", "top_logprobs")
        choice: Any = self.tool_choice
        if isinstance(choice, ToolName):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [each.model_dump(exclude={"type"}, exclude_none=True) for each in self.tools or ()]
        fields: dict[str, Any] = {
            "stream": self.stream,
            "messages": self._messages(),
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        own = {"max_output_tokens": self.max_output_tokens, "text.format": given.get("response_format")}
        for name, value in self.others.items():
            field = self.own_names.get(ALIASES.get(name, name), "")
            if value is not None and own.get(field) is not None:
                check_same(field, name, {name: value, **own})
        return ChatRequest.model_validate({**self.others, **given})

    def _response_format(self) -> Mapping[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type != "json_schema":
            return None if wanted is None else {"type": wanted.type}
        if wanted.schema_ is None:
            name = "text.format.schema"
            raise RequestError(f"{name} is missing; give one.", name, "missing_required_parameter")
        return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        names: dict[str, str] = {}
        for index, item in enumerate(self.input):
            _add_item(found, item, f"input.{index}", names)
        return found


def _add_item(messages: list[dict[str, Any]], item: InputItem, where: str, names: dict[str, str]) -> None:
    """Add an item of the input to the messages of a chat.

    where: the item's place in the request, for error messages.
    names: id of a call -> name of the tool; a call adds its own.
    """
    if item.type == "reasoning":
        return
    if item.type == "message":
        content = text_of(item.content, f"{where}.content")
        messages.append({"role": _require(item.role, where, "role"), "content": content})
    elif item.type == "function_call":
        call_id, name = _require(item.call_id, where, "call_id"), _require(item.name, where, "name")
        names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": item.arguments or "{}"}}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        call_id = _require(item.call_id, where, "call_id")
        named = {"name": names[call_id]} if call_id in names else {}
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": text_of(item.output, f"{where}.output"), **named}
        )


def _require(value: str | None, where: str, name: str) -> str:
    if not value:
        raise RequestError(f"{where}.{name} is missing.", f"{where}.{name}", "missing_required_parameter")
    return value


_ONLY_FOR_TEXT = "belongs to a request for text; remove it"
_GRAMMAR = "cannot be inspected, because a grammar's mask is not recomputed; inspect an answer without it"
_TokenIds = list[Annotated[int, Field(strict=True, ge=0)]]


class InspectRequest(GenerationRequest):
    """The body of /topw/inspect: the fields of a request that was answered, and the token of its answer to explain.

    prompt_token_ids: token ids of the prompt, at least one.
    token_ids: token ids of the answer, at least up to the token to explain.
    position: index of the token to explain in `token_ids`, from 0.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("stream", "stream_options", "max_time", "cache_prompt"), _ONLY_FOR_TEXT),
        **dict.fromkeys(("structured_outputs", "response_format"), _GRAMMAR),
    }

    prompt_token_ids: _TokenIds = Field(min_length=1)
    token_ids: _TokenIds = Field(min_length=1)
    position: StrictInt = Field(ge=0)


class TokenizeRequest(ModelRequest):
    """The body of /tokenize: a text, or the messages of a chat.

    add_special_tokens: whether the tokenizer adds its special tokens to a text; a rendered chat has its own.
    return_token_strs: whether the answer has the text of each token.
    """

    prompt: StrictStr | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeRequest(ModelRequest):
    """The body of /detokenize."""

    tokens: list[StrictInt]

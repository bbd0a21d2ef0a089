"""Turns a chat request into the prompt, the tools and the parameters of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import ToolCallParser
from topw_deploy.runtime.tools.grammar import required_calls
from topw_deploy.runtime.tools.schema import parameter_schemas
from topw_deploy.serve.failures import invalid_request
from topw_deploy.serve.schemas.generation import ChatRequest, Message, NamedTool
from topw_deploy.serve.served import Served

_RESERVED_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")
"""Variables of the chat template that only the server sets."""


@dataclass(frozen=True)
class ChatPlan:
    """A checked chat request.

    messages, variables: of the chat template.
    parameters: of the engine.
    add_special_tokens: whether the tokenizer adds its special tokens to the rendered prompt.
    tools: the tools whose calls the answer may have; None if the answer is read as plain text.
    parallel: whether an answer may have several calls.
    """

    served: Served
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    parameters: Mapping[str, Any]
    add_special_tokens: bool
    tools: list[dict[str, Any]] | None
    parallel: bool

    def render_prompt(self) -> tuple[str, list[int]]:
        """Returns (the rendered prompt, its token ids). Slow: call it in a thread."""
        text = self.served.render(self.messages, self.variables)
        return text, self.served.encode(text, self.add_special_tokens)

    def parser(self, prompt: str) -> ToolCallParser | None:
        """A parser for one answer; None if the answer is plain text."""
        if self.tools is None:
            return None
        return self.served.model.tool_parser(self.tools, self.served.tool_family, prompt)


def plan_and_tokenize(body: ChatRequest, served: Served) -> tuple[ChatPlan, str, list[int]]:
    """Returns (plan, rendered prompt, its token ids). Slow: call it in a thread.

    Raises the errors of `plan_chat`, `Served.render` and `Served.encode`.
    """
    plan = plan_chat(body, served)
    return plan, *plan.render_prompt()


def plan_chat(body: ChatRequest, served: Served) -> ChatPlan:
    """Check a chat request. Raises RequestError and ParameterError for a field that is invalid or not supported."""
    parameters = body.parameters()
    parameters |= served.default_length(parameters) | _logprobs_parameter(body)
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    if tools is None and body.tool_choice not in (None, "none", "auto"):
        raise invalid_request("tool_choice asks for a call, but there are no tools; give tools.", "tool_choice")
    if tools is not None:
        parameter_schemas(tools)
        parameters |= _tool_parameters(body, tools, served, "structured_outputs" in parameters)
    return ChatPlan(
        served,
        template_messages(body.messages),
        template_variables(body.chat_template_kwargs, tools, body.reasoning_effort),
        parameters,
        add_special_tokens=parameters.pop("add_special_tokens", False),
        tools=tools,
        parallel=body.parallel_tool_calls is not False,
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as the chat template takes them."""
    return [message.as_dict(f"messages.{index}") for index, message in enumerate(messages)]


def template_variables(
    given: Mapping[str, Any] | None, tools: Sequence[Any] | None, effort: str | None = None
) -> dict[str, Any]:
    """The variables of the chat template.

    given: the request's `chat_template_kwargs`.

    Raises RequestError for a variable in `given` that only the server sets.
    """
    for name in given or ():
        if name in _RESERVED_VARIABLES:
            raise invalid_request(
                f"chat_template_kwargs has {name}, which the server sets; remove it.", "chat_template_kwargs"
            )
    found = {"tools": tools, "reasoning_effort": effort}
    return {name: value for name, value in found.items() if value is not None} | dict(given or {})


def _logprobs_parameter(body: ChatRequest) -> dict[str, int]:
    if body.logprobs:
        return {"logprobs": body.top_logprobs or 0}
    if body.top_logprobs:
        raise invalid_request('top_logprobs is given without logprobs; add "logprobs": true.', "top_logprobs")
    return {}


def _tool_parameters(body: ChatRequest, tools: list[dict[str, Any]], served: Served, constrained: bool) -> dict:
    if served.tool_family is None:
        raise invalid_request(
            f"the chat template of {served.name} has tool calls of no known family; send no tools, or start the "
            "server with --tool-parser.",
            "tools",
            "tools_unsupported",
            422,
        )
    found: dict[str, Any] = {"skip_special_tokens": False}  # the markers of calls may be special tokens
    choice = body.tool_choice
    if choice in (None, "auto"):
        return found
    if constrained:
        raise invalid_request(
            "tool_choice asks for a call, so the answer cannot match a schema too; give one.", "tool_choice"
        )
    try:
        grammar = required_calls(
            tools,
            served.tool_family,
            name=choice.function.name if isinstance(choice, NamedTool) else None,
            parallel=body.parallel_tool_calls is not False,
            special_tokens={text: token for token, text in served.model.tokenizer.special_ids.items()},
        )
    except ParameterError as error:
        raise invalid_request(f"tool_choice: {error}", "tool_choice") from None
    return {**found, "structured_outputs": {"grammar": grammar}}

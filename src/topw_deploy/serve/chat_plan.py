"""What a chat request asks of the engine: messages, tools and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import ToolCallParser
from topw_deploy.runtime.tools.required import required_calls
from topw_deploy.runtime.tools.schema import parameter_schemas
from topw_deploy.serve.failures import invalid
from topw_deploy.serve.schemas.generation import ChatRequest, Message, NamedTool
from topw_deploy.serve.served import Served

_OWN_VARIABLES = ("self", "messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class ChatPlan:
    """A chat request, ready to run.

    messages, variables: of the chat template.
    parameters: of the engine.
    special: whether the tokenizer adds its special tokens to the rendered prompt.
    tools: the tools whose calls are looked for in the answer; None for plain text.
    parallel: whether an answer may have several calls.
    """

    served: Served
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    parameters: Mapping[str, Any]
    special: bool
    tools: list[dict[str, Any]] | None
    parallel: bool

    def prompt(self) -> tuple[str, list[int]]:
        """The rendered prompt and its token ids. Slow: call it in a thread."""
        text = self.served.render(self.messages, self.variables)
        return text, self.served.encode(text, self.special)

    def parser(self, prompt: str) -> ToolCallParser | None:
        """A parser for one answer, None if it is plain text."""
        if self.tools is None:
            return None
        return self.served.model.tool_parser(self.tools, self.served.tool_family, prompt)


def planned(body: ChatRequest, served: Served) -> tuple[ChatPlan, str, list[int]]:
    """Returns (plan, rendered prompt, its token ids). Slow: call it in a thread.

    Raises the errors of `plan_chat` and `prompt`.
    """
    plan = plan_chat(body, served)
    return plan, *plan.prompt()


def plan_chat(body: ChatRequest, served: Served) -> ChatPlan:
    """Raises RequestError and ParameterError for fields that are invalid, or unsupported by the model."""
    parameters = body.parameters()
    parameters |= served.budget(parameters) | _logprobs(body)
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    if tools is None and body.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice asks for a call, but there are no tools; give tools.", "tool_choice")
    if tools is not None:
        parameter_schemas(tools)
        parameters |= _tool_parameters(body, tools, served, "structured_outputs" in parameters)
    return ChatPlan(
        served,
        messages_of(body.messages),
        template_variables(body.chat_template_kwargs, tools, body.reasoning_effort),
        parameters,
        special=parameters.pop("add_special_tokens", False),
        tools=tools,
        parallel=body.parallel_tool_calls is not False,
    )


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For the chat template."""
    return [message.as_dict(f"messages.{index}") for index, message in enumerate(messages)]


def template_variables(
    given: Mapping[str, Any] | None, tools: Sequence[Any] | None, effort: str | None = None
) -> dict[str, Any]:
    """Variables of the chat template. Raises RequestError for one that the server sets."""
    for name in given or ():
        if name in _OWN_VARIABLES:
            raise invalid(f"chat_template_kwargs has {name}, which the server sets; remove it.", "chat_template_kwargs")
    found = {"tools": tools, "reasoning_effort": effort}
    return {name: value for name, value in found.items() if value is not None} | dict(given or {})


def _logprobs(body: ChatRequest) -> dict[str, int]:
    if body.logprobs:
        return {"logprobs": body.top_logprobs or 0}
    if body.top_logprobs:
        raise invalid('top_logprobs is given without logprobs; add "logprobs": true.', "top_logprobs")
    return {}


def _tool_parameters(body: ChatRequest, tools: list[dict[str, Any]], served: Served, constrained: bool) -> dict:
    if served.tool_family is None:
        raise invalid(
            f"the chat template of {served.name} has tool calls of no known family; send no tools, or start the "
            "server with --tool-parser.",
            "tools",
            "tools_unsupported",
            422,
        )
    found: dict[str, Any] = {"skip_special_tokens": False}  # markers of calls may be special tokens
    choice = body.tool_choice
    if choice in (None, "auto"):
        return found
    if constrained:
        raise invalid("tool_choice asks for a call, so the answer cannot match a schema too; give one.", "tool_choice")
    try:
        grammar = required_calls(
            tools,
            served.tool_family,
            name=choice.function.name if isinstance(choice, NamedTool) else None,
            parallel=body.parallel_tool_calls is not False,
            special_tokens={text: token for token, text in served.model.tokenizer.special_ids.items()},
        )
    except ParameterError as error:
        raise invalid(f"tool_choice: {error}", "tool_choice") from None
    return {**found, "structured_outputs": {"grammar": grammar}}

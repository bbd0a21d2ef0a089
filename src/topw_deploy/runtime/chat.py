"""Chat templates: Jinja2 programs that render messages to a prompt.

Templates are untrusted: they run in Jinja's immutable sandbox, with bounds (`template.meter`), on plain copies of data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from topw_deploy.errors import PromptError, TokenizerError, TopWError, one_line
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.template.environment import TemplateEnvironment
from topw_deploy.runtime.template.meter import DEPTH, Meter
from topw_deploy.runtime.tokenizer import CONFIG_FILE, Tokenizer
from topw_deploy.runtime.tools.messages import call_form
from topw_deploy.runtime.tools.schema import schemas_of

TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError)


class ChatTemplate:
    """A compiled template. Raises TokenizerError for an invalid template.

    source: the template's text.
    name: the template's file, for messages.
    with_tools: the template for messages with tools; None if it is this one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = TEMPLATE_FILE,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        self.source = source
        self.with_tools = with_tools
        self._call_form = call_form(source)
        self._special_tokens = dict(special_tokens)
        self._name = name
        try:
            self._template = TemplateEnvironment().compile_template(source)
        except (RecursionError, MemoryError):
            reason = "its expressions or blocks are nested too deeply"
        except (jinja2.TemplateError, SyntaxError, *_TEMPLATE_ERRORS) as error:
            reason = one_line(error, 200)
        else:
            return
        raise TokenizerError(f"{name}: the chat template is not valid ({reason}); correct it and export again.")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages`, each with `role` and `content`.

        variables: other variables of the template, such as `tools` (JSON schemas, or Python functions) and
            `enable_thinking`.

        Raises PromptError for malformed or rejected messages, ParameterError for a function without a schema,
        TokenizerError for a template that exceeds its bounds.
        """
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise PromptError("messages must be a non-empty list of mappings with a 'role' and a 'content'.")
        if taken := sorted(variables.keys() & self._special_tokens.keys()):
            raise PromptError(f"the variable {taken[0]!r} is set by the tokenizer; remove it.")
        if variables.get("tools") is not None:
            variables["tools"] = schemas_of(variables["tools"])
        given = {"tools": None, "documents": None, **variables, "messages": self._call_form.adapt(messages)}
        plain = {name: _copy_plain(value) for name, value in given.items()}
        values = {**self._special_tokens, **plain, "add_generation_prompt": add_generation_prompt}
        try:
            with Meter(self._name, values.values()).running():
                return self._template.render(values)
        except TopWError:
            raise
        except (RecursionError, MemoryError):
            raise PromptError(
                f"{self._name}: the chat template ran out of stack or memory on these messages."
            ) from None
        except Exception as error:  # noqa: BLE001  # untrusted code
            raise PromptError(f"the chat template refused the messages: {one_line(error, 1000)}") from None


def load_chat_template(folder: ModelFolder, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the folder's template; None if it has none.

    It is `chat_template.jinja`, else `chat_template` in the tokenizer's configuration: a text, or a list of named
    templates, of which `default` and, for messages with tools, `tool_use` are used.
    """
    name = TEMPLATE_FILE if folder.has(TEMPLATE_FILE) else CONFIG_FILE
    source = folder.read_text(name) if name == TEMPLATE_FILE else tokenizer.config.get("chat_template")
    named = {}
    if isinstance(source, list):
        named = {str(t.get("name")): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    place, with_tools = str(folder.path / name), named.get("tool_use")
    tool_use = ChatTemplate(with_tools, tokenizer.special_tokens, place) if isinstance(with_tools, str) else None
    return ChatTemplate(source, tokenizer.special_tokens, place, tool_use)


def _copy_plain(value: Any, depth: int = 0) -> Any:
    """Copy a value to Python's own types, so that the template cannot call methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if depth >= DEPTH:
        raise PromptError(f"messages have lists or mappings nested more than {DEPTH} deep; flatten them.")
    if isinstance(value, Mapping):
        return {str(key): _copy_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy_plain(item, depth + 1) for item in value]
    if isinstance(value, np.generic):
        return _copy_plain(value.item(), depth + 1)
    raise PromptError(f"messages may hold text, numbers, lists and mappings, not a {type(value).__name__}.")

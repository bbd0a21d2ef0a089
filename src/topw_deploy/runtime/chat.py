"""Chat templates: the Jinja2 program that turns messages into a prompt.

A template comes with the model, so it is somebody else's code. It runs in Jinja's immutable sandbox and sees plain
data only: strings, numbers, lists and dictionaries rebuilt from what the caller gave.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from topw_deploy.errors import PromptError, TokenizerError
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """A compiled template. Raises TokenizerError when its text is not a valid one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        # Jinja makes Python source of it: nested too deeply, or with a number or character that Python refuses, it
        # fails in the compiler.
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TokenizerError(
                f"the chat template is not valid ({reason}); correct {TEMPLATE_FILE} and export again."
            ) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`, each a mapping with `role` and `content`; `variables` (`tools`,
        `enable_thinking`, ...) reach the template by their names.

        Raises PromptError for malformed messages and for what the template itself refuses.
        """
        if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise PromptError("messages must be a non-empty list of mappings with a 'role' and a 'content'.")
        plain = {name: _plain(value) for name, value in {"tools": None, "documents": None, **variables}.items()}
        try:
            return self._template.render(
                **self._special_tokens, **plain, messages=_plain(messages), add_generation_prompt=add_generation_prompt
            )
        except (RecursionError, MemoryError):
            raise PromptError("the chat template ran out of stack or memory on these messages.") from None
        except Exception as error:  # noqa: BLE001  # somebody else's program may fail in any way
            raise PromptError(f"the chat template refused the messages: {' '.join(str(error).split())}") from None


def load_template(folder: ModelFolder, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The folder's template: `chat_template.jinja`, or `chat_template` of the tokenizer's configuration (a string,
    or a list of named ones of which `default` is taken); None if there is none."""
    source = folder.read_text(TEMPLATE_FILE) if folder.has(TEMPLATE_FILE) else tokenizer.config.get("chat_template")
    if isinstance(source, list):
        named = [t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"]
        source = named[-1] if named else None
    return ChatTemplate(source, tokenizer.special_tokens) if isinstance(source, str) else None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a trained model is to learn; when rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # Jinja declares it as a plain set

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, but a template can put nothing there that Python gives a meaning to."""

    def __init__(*arguments: Any, **attributes: Any) -> None:  # `self` may be an attribute's name
        self, *rest = arguments
        values = dict(*rest, **attributes)
        for name in values:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the attribute {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain(value: Any) -> Any:
    """`value` rebuilt from plain types, so that the template meets no methods but theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    raise PromptError(f"messages may hold text, numbers, lists and mappings, not a {type(value).__name__}.")

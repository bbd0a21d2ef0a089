"""Chat templates: Jinja programs that render messages to a prompt.

Templates are untrusted. minijinja runs them without Python, with fuel for their steps and the sizes of their values,
and with a limit on recursion. They see read-only copies of plain data.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import minijinja
import numpy as np

from topw_deploy.errors import PromptError, TokenizerError, one_line
from topw_deploy.manifest import ModelFolder
from topw_deploy.runtime.tokenizer import CONFIG_FILE, Tokenizer
from topw_deploy.runtime.tools.formats import detect
from topw_deploy.runtime.tools.literals import JSON, Mismatch, parse_value, to_json
from topw_deploy.runtime.tools.schema import schemas_of

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
"""transformers' folder of chat templates other than the default one."""
_TOOL_USE = "tool_use"
_TOOL_USE_FILE = f"{TEMPLATES_FOLDER}/{_TOOL_USE}.jinja"
FUEL = 10_000_000  # steps, and characters of values by the dozen; a chat of 10 MB takes less than 3,000,000
# Published templates have up to about 30,000 characters. Much longer ones overflow the compiler's stack.
_MOST_CHARACTERS, _LONGEST_TAG = 50_000, 8192
_MOST_NESTED = 100  # lists and mappings in messages
_WIDE = re.compile(r"\{[^{}]*\d{4}")  # widths in texts that are formatted
_WIDEST = 32  # characters of indentation and of separators in JSON

_TAG = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")  # marks text for training
_TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_FORMAT = re.compile(r"\.\s*format\s*\(")
_SHORT_FORMAT = re.compile(_TEXT + _FORMAT.pattern)
_PERCENT_MANY = re.compile(_TEXT + r"\s*%\s*\((?=[^()]*,)")
_PERCENT_ONE = re.compile(_TEXT + r"\s*%\s*([A-Za-z_]\w*(?:\.\w+|\[[^\[\]]*\])*)(?![\w.(\[])")


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
        self._adapt_messages = _message_adapter(source)
        self._special_tokens = dict(special_tokens)
        self._name = name
        self._environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            fuel=FUEL,
            debug=False,
            filters={"tojson": _to_json},
            globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        )
        try:
            self._environment.add_template("chat", _translate(source))
        except (minijinja.TemplateError, ValueError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise TokenizerError(
                f"{name}: the chat template is not valid ({reason}); correct it and export again."
            ) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render `messages`, each with `role` and `content`. Fields that are None are left out, as in transformers.

        variables: other variables of the template, such as `tools` (JSON schemas, or Python functions) and
            `enable_thinking`.

        Raises PromptError for malformed or rejected messages, ParameterError for a function without a schema,
        TokenizerError for a template that runs out of fuel.
        """
        if self.with_tools is not None and variables.get("tools") is not None:
            return self.with_tools.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise PromptError("messages must be a non-empty list of mappings with a 'role' and a 'content'.")
        if taken := sorted(variables.keys() & self._special_tokens.keys()):
            raise PromptError(f"the variable {taken[0]!r} is set by the tokenizer; remove it.")
        if variables.get("tools") is not None:
            if variables["tools"] and "tools" not in self.source:
                warnings.warn(
                    "the chat template does not show tools to the model; describe them in a message.", stacklevel=3
                )
            variables["tools"] = schemas_of(variables["tools"])
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        values = {"tools": None, "documents": None, **variables, "messages": self._adapt_messages(messages)}
        values = {name: _copy_plain(value) for name, value in values.items()}
        values |= self._special_tokens | {"add_generation_prompt": add_generation_prompt}
        try:
            return self._environment.render_template("chat", **values)
        except Exception as error:  # noqa: BLE001  # untrusted code
            if "ran out of fuel" in str(error):
                raise TokenizerError(
                    f"{self._name}: the chat template takes more steps or memory than any chat template should need; "
                    "correct it and export the model again, or use a plain prompt."
                ) from None
            raise PromptError(f"the chat template refused the messages: {one_line(error, 1000)}") from None


def load_chat_template(folder: ModelFolder, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the folder's template; None if it has none.

    It is `chat_template.jinja`, else `chat_template` in the tokenizer's configuration: a text, or a list of named
    templates, of which `default` and `tool_use` are used. `additional_chat_templates/tool_use.jinja` goes before that
    `tool_use`. It is for messages with tools, or for all without a default.
    """
    name = TEMPLATE_FILE if folder.has(TEMPLATE_FILE) else CONFIG_FILE
    stated = folder.read_text(name) if name == TEMPLATE_FILE else tokenizer.config.get("chat_template")
    named, place, special = named_templates(stated), str(folder.path / name), tokenizer.special_tokens
    if folder.has(_TOOL_USE_FILE):
        named[_TOOL_USE] = folder.read_text(_TOOL_USE_FILE)
    tool_use = ChatTemplate(named[_TOOL_USE], special, place) if _TOOL_USE in named else None
    return ChatTemplate(named["default"], special, place, tool_use) if "default" in named else tool_use


def named_templates(stated: object) -> dict[str, str]:
    """Return the templates by name that a JSON file states: one text, which is `default`, or several with names."""
    if isinstance(stated, list):
        stated = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
    named = stated if isinstance(stated, dict) else {"default": stated}
    return {str(name): text for name, text in named.items() if isinstance(text, str)}


_AS_JSON = re.compile(r"""arguments['"]?\]?\s*\|\s*tojson""")
_WITHOUT_CONTENT = re.compile(r"""content['"]?\]? is (not )?none""")


def _message_adapter(template: str) -> Callable[[Sequence[Mapping[str, Any]]], list[Mapping[str, Any]]]:
    """Returns a function that copies messages with tool calls to the form that a chat template takes.

    OpenAI's clients and `Parsed.as_message` give a call's arguments as JSON text, and "" for no content. Most templates
    print arguments with `tojson`, which would quote the text again; some of DeepSeek's take text, and None for no
    content. Harmony's take reasoning as `thinking`. Messages for templates of unknown families stay as they are.
    """
    family = detect(template)
    takes_text = family == "deepseek" and not _AS_JSON.search(template)
    takes_none = family == "deepseek" and _WITHOUT_CONTENT.search(template)

    def adapt_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, (list, tuple)):
            return message
        adapted = {**message, "tool_calls": [adapt_call(call) for call in calls]}
        if not message.get("content"):
            if takes_none:
                adapted["content"] = None
            # The template refuses `thinking` beside content.
            if family == "harmony" and message.get("reasoning_content"):
                adapted.setdefault("thinking", message["reasoning_content"])
        return adapted

    def adapt_call(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": adapt_call(call["function"])}
        return {**call, "arguments": adapt_arguments(call["arguments"])} if "arguments" in call else call

    def adapt_arguments(arguments: Any) -> Any:
        try:
            if takes_text:
                return to_json(arguments) if isinstance(arguments, Mapping) else arguments
            return parse_value(arguments, JSON) if isinstance(arguments, str) else arguments
        except (Mismatch, TypeError, ValueError):
            return arguments

    return lambda messages: [message if family is None else adapt_message(message) for message in messages]


def _translate(source: str) -> str:
    """Replace what minijinja lacks: `{% generation %}`, and `%` behind a literal text, which becomes a filter.

    Raises ValueError for a template that is too long to compile.
    """
    if len(source) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(source):,} characters, more than {_MOST_CHARACTERS:,}")
    if (longest := max((len(tag) for tag in _TAG.findall(source)), default=0)) > _LONGEST_TAG:
        raise ValueError(f"it has a tag of {longest:,} characters, more than {_LONGEST_TAG:,}")

    # Fuel does not count what the method `format` makes, such as '{:9999999}'.format(1).
    for tag in _TAG.findall(source):
        formats = [found[1] for found in _SHORT_FORMAT.finditer(tag)]
        if len(formats) < len(_FORMAT.findall(tag)) or any(map(_WIDE.search, formats)):
            raise ValueError("it calls the method format of a value other than a text with widths below 1,000")

    def translate_tag(tag: re.Match[str]) -> str:
        text = _GENERATION.sub(lambda m: f"{m[1]} {'endif' if m[2] else 'if true'} {m[3]}", tag[0])
        return _PERCENT_ONE.sub(r"\1|format(\2)", _PERCENT_MANY.sub(r"\1|format(", text))

    return _TAG.sub(translate_tag, source)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` as in transformers, which does not escape HTML."""
    width = indent if isinstance(indent, int) else len(indent or "")
    if max(width, *map(len, separators or [""])) > _WIDEST:
        raise ValueError(f"tojson takes indents and separators of up to {_WIDEST} characters")
    separators = None if separators is None else tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse_change(*_arguments: Any, **_keywords: Any) -> NoReturn:
    raise TypeError("a template may not change the messages")


class _List(list[Any]):
    """A list that a template can only read."""

    append = clear = copy = extend = insert = pop = remove = reverse = sort = _refuse_change  # type: ignore[assignment]


class _Mapping(dict[str, Any]):
    """A mapping that a template can only read."""

    clear = copy = fromkeys = pop = popitem = setdefault = update = _refuse_change  # type: ignore[assignment]


def _copy_plain(value: Any, depth: int = 0) -> Any:
    """Copy a value to plain types, so that the template cannot call methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if depth >= _MOST_NESTED:
        raise PromptError(f"messages have lists or mappings nested more than {_MOST_NESTED} deep; flatten them.")
    if isinstance(value, Mapping):
        return _Mapping((str(key), _copy_plain(item, depth + 1)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return _List(_copy_plain(item, depth + 1) for item in value)
    if isinstance(value, np.generic):
        return _copy_plain(value.item(), depth + 1)
    raise PromptError(f"messages may hold text, numbers, lists and mappings, not a {type(value).__name__}.")

"""Parses a model's output while it arrives, by the table of formats."""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.results import GenerationResult
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.runtime.tools.formats import Family, Format, get_family
from topw_deploy.runtime.tools.literals import (
    JSON,
    PYTHON,
    Cursor,
    Mismatch,
    Waiting,
    has_surrogates,
    parse_value,
    pattern_of,
    read_mapping,
    read_value,
    to_json,
    unfinished_length,
)
from topw_deploy.runtime.tools.schema import parameter_schemas


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    id: unique in the output; the model's own if its format has ids.
    name: the tool's name.
    arguments: the text of a JSON object.
    """

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """The call as in OpenAI's assistant messages."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def reply(self, content: str) -> dict[str, Any]:
        """The message with the tool's result. content: text; JSON if the tool returns data."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """The end of one message, in formats whose outputs have several messages."""


Event: TypeAlias = Content | Reasoning | ToolCall


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed output.

    content: the text outside of calls and reasoning; malformed calls stay in it.
    reasoning: None if there is none.
    tool_calls: in the order of the output.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Parsed:
        """Join a parser's events."""
        events = list(events)
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        return cls(content, reasoning or None, tuple(event for event in events if isinstance(event, ToolCall)))

    def as_message(self) -> dict[str, Any]:
        """The assistant's message for the next turn of a chat: OpenAI's form, and `reasoning_content`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message


def join_neighbours(events: Sequence[Event]) -> list[Event]:
    """Join adjacent Content events, and adjacent Reasoning events."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, (Content, Reasoning)) and isinstance(last, type(event)):
            joined[-1] = type(event)(last.text + event.text)
        else:
            joined.append(event)
    return joined


Reading: TypeAlias = Generator["Event | MessageEnd | None", None, Any]
"""Yields events, and None to wait for more text."""
_FIELD = re.compile(r"\{(\w+)\}")
_WORDS = re.compile(r"[^\s<]+|<[^<>\s]*>?")  # of a format's text: markers and what stands between them
_NAME = re.compile(r"[^\s<>{}\[\]`]*")
_TAG_NAME = re.compile(r"[^<>\n]*")
_DOTTED = re.compile(r"(?!\d)[\w.]*")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_HEADER_ENDS = ("<|message|>", "<|channel|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")


@dataclass(frozen=True)
class _Reader:
    """Reads the calls of one output at a cursor.

    tools: name of a tool -> schema of its parameters; None if the tools are not known.
    short_ids: see `Family`.
    """

    cursor: Cursor
    tools: Mapping[str, Mapping[str, Any]] | None
    short_ids: bool

    def calls(self, form: Format) -> Reading:
        """Read the calls after the opener. Raises Mismatch if there are none; calls before a malformed part count."""
        cursor, end, calls = self.cursor, _WORDS.findall(form.end), []
        yield from cursor.skip_space()
        if form.begin:
            yield from cursor.expect(form.begin)
        while True:
            calls.append((yield from self._call(form)))
            if not form.whole:
                yield calls[-1]
            after = cursor.at
            yield from cursor.skip_space()
            if end and (yield from cursor.accept(end[0])):
                for word in end[1:]:
                    yield from self._close(word, form)
                break
            between = form.between.strip() if form.between is not None else None
            found = between is not None and (yield from cursor.accept(between))
            if not found and between != "" and not (between and form.call == "{object}"):  # models leave out commas
                if form.whole:
                    raise Mismatch
                cursor.at = after
                return
        if form.whole:
            yield from calls

    def message(self, opener: str) -> Reading:
        """Read a message of Harmony after `opener`: a marker, or "" at the start of the answer.

        The prompt ends with `<|start|>assistant`, so an answer may begin with the rest of a header: its recipient.
        """
        cursor, header = self.cursor, ""
        if opener != "<|channel|>":
            yield from cursor.skip_space()
            if not opener:
                header = yield from cursor.expect("to=")
            header += yield from cursor.take_until(*_HEADER_ENDS)
            yield from cursor.expect("<|channel|>")
        rest = yield from cursor.take_until(*_HEADER_ENDS)
        yield from cursor.expect("<|message|>")
        channel, _, rest = rest.partition("<|constrain|>")[0].strip().partition(" ")
        if recipient := _RECIPIENT.search(f"{header} {rest}"):
            name = recipient[1].removeprefix("functions.")
            call = self._make(name, (yield from read_mapping(cursor, JSON)))
            yield from cursor.skip_space()
            if (yield from cursor.peek()):
                yield from cursor.expect("<|end|>", "<|call|>", "<|return|>")
            yield call
            return
        yield MessageEnd()
        event: Callable[[str], Content | Reasoning] = Reasoning if channel == "analysis" else Content
        end = yield from cursor.stream_until(event, *_HEADER_ENDS[2:])
        if end == "<|start|>":  # the model left out the end marker
            cursor.at -= len(end)

    def _call(self, form: Format) -> Waiting[ToolCall]:
        cursor, name, call_id, call = self.cursor, "", None, None
        for index, part in enumerate(_FIELD.split(form.call)):
            if index % 2 == 0:
                for word in _WORDS.findall(part):
                    if call is None:
                        yield from cursor.skip_space()
                        yield from cursor.expect(word)
                    else:
                        yield from self._close(word, form)
                continue
            yield from cursor.skip_space()
            if part == "name":
                name = yield from cursor.take_matching(_NAME)
            elif part == "id":
                call_id = yield from cursor.take_matching(_NAME)
            elif part == "arguments":
                call = self._make(name, (yield from read_mapping(cursor, form.dialect)), call_id)
            elif part == "object":
                call = self._from_object((yield from read_value(cursor, JSON)), unmarked=not form.opener)
            elif part == "tags":
                call = yield from self._tags()
            else:
                call = yield from self._python_call(".call" if part == "builtin" else "")
        if call is None or (not form.opener and self.tools is not None and call.name not in self.tools):
            raise Mismatch
        return call

    def _close(self, word: str, form: Format) -> Waiting[None]:
        """Take a closing text, which models leave out at the end of the text and before the next call."""
        cursor = self.cursor
        end = cursor.at
        yield from cursor.skip_space()
        if not (yield from cursor.accept(word)):
            if (yield from cursor.peek()) and not (yield from cursor.accept(form.opener)):
                raise Mismatch
            cursor.at = end

    def _make(self, name: Any, arguments: Any, call_id: Any = None) -> ToolCall:
        """Make a call. call_id: the model's id, or None.

        Raises Mismatch unless `name` is a non-empty text and `arguments` is a dict, the JSON text of one, or None.
        """
        if isinstance(arguments, str):
            arguments = parse_value(arguments, JSON)
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name.strip() or has_surrogates(name) or not isinstance(arguments, dict):
            raise Mismatch
        try:
            text = to_json(arguments)
        except ValueError:
            raise Mismatch from None
        if not isinstance(call_id, str) or not call_id:
            letters = string.ascii_letters + string.digits
            short = self.short_ids
            call_id = "".join(map(secrets.choice, [letters] * 9)) if short else f"call_{secrets.token_hex(12)}"
        return ToolCall(call_id, name.strip(), text)

    def _from_object(self, value: Any, *, unmarked: bool) -> ToolCall:
        """Make the call that a JSON object with `arguments` or `parameters` describes. Raises Mismatch if it does not.

        unmarked: whether no marker before the object says that it is a call. Then it must have arguments.
        """
        inner = value.get("function") if isinstance(value, dict) else None
        body = inner if isinstance(inner, dict) else value
        if not isinstance(body, dict):
            raise Mismatch
        key = next((key for key in ("arguments", "parameters") if key in body), None)
        if unmarked and key is None:
            raise Mismatch
        return self._make(body.get("name"), body[key] if key else None, value.get("id") if self.short_ids else None)

    def _properties(self, name: str) -> Mapping[str, Any]:
        """The schema of each parameter of a tool, by the parameter's name; empty if the tool is not known."""
        properties = (self.tools or {}).get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _tags(self) -> Waiting[ToolCall]:
        """Read `name>` up to `</function>`: a JSON object as Llama 3's, or a tag per parameter as Qwen3-Coder's."""
        cursor = self.cursor
        name = (yield from cursor.take_matching(_TAG_NAME)).strip()
        yield from cursor.expect(">")
        yield from cursor.skip_space()
        if (yield from cursor.peek()) == "{":
            arguments = yield from read_mapping(cursor, JSON)
            yield from cursor.skip_space()
            yield from cursor.expect("</function>")
        else:
            arguments, schemas = {}, self._properties(name)
            while (yield from cursor.expect("<parameter=", "</function>")) == "<parameter=":
                key = (yield from cursor.take_matching(_TAG_NAME)).strip()
                yield from cursor.expect(">")
                arguments[key] = typed_value((yield from self._tag_text()), schemas.get(key))
        return self._make(name, arguments)

    def _tag_text(self) -> Waiting[str]:
        """Read a parameter's value up to an end tag that another tag follows: the value may contain end tags."""
        cursor = self.cursor
        begin = cursor.at
        while True:
            yield from cursor.take_until("</parameter>")
            end = cursor.at
            cursor.at += len("</parameter>")
            yield from cursor.skip_space()
            after = cursor.at
            if (yield from cursor.accept("<parameter=", "</function>")):
                cursor.at = after
                return cursor.text[begin:end].removeprefix("\n").removesuffix("\n")
            cursor.at = end + 1

    def _python_call(self, suffix: str) -> Waiting[ToolCall]:
        """Read `name(key=value, ...)`, also within `print(...)`. suffix: of the name, but not part of the tool's."""
        cursor = self.cursor
        printed = yield from cursor.accept("print(")
        yield from cursor.skip_space()
        name = yield from cursor.take_matching(_DOTTED)
        if not name.endswith(suffix):
            raise Mismatch
        name = name.removesuffix(suffix)
        names = list(self._properties(name))  # for arguments without a name
        arguments: dict[str, Any] = {}
        yield from cursor.expect("(")
        yield from cursor.skip_space()
        end = yield from cursor.accept(")")
        while end != ")":
            yield from cursor.skip_space()
            begin = cursor.at
            key = yield from cursor.take_matching(_DOTTED)
            yield from cursor.skip_space()
            if not key or not (yield from cursor.accept("=")):
                cursor.at = begin
                key = names[len(arguments)] if len(arguments) < len(names) else ""
            if not key or key in arguments:
                raise Mismatch
            arguments[key] = yield from read_value(cursor, PYTHON)
            yield from cursor.skip_space()
            end = yield from cursor.expect(",", ")")
        if printed:
            yield from cursor.skip_space()
            yield from cursor.expect(")")
        return self._make(name, arguments)


def typed_value(text: str, schema: Any) -> Any:
    """Returns `text` as a value of the type that `schema` states, read as JSON or Python.

    Returns `text` itself if the schema allows text or states no type, or if `text` is no such value.
    """
    types = _allowed_types(schema)
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    for dialect in (JSON, PYTHON):
        with contextlib.suppress(Mismatch):
            return parse_value(text, dialect)
    return text


def _allowed_types(schema: Any) -> set[str]:
    """The types that `schema` names, also in its alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    own, types = schema.get("type"), {"null"} if schema.get("nullable") is True else set()
    types |= {kind for kind in (own if isinstance(own, list) else [own]) if isinstance(kind, str)}
    for part in ("anyOf", "oneOf"):
        options = schema.get(part)
        types = types.union(*map(_allowed_types, options if isinstance(options, list) else ()))
    return types


class ToolCallParser:
    """Splits an output into content, reasoning and tool calls.

    Text that may be the beginning of a call is held back until it is known to be one or not. A malformed or truncated
    call becomes content. White space is left out around reasoning, between calls and after the last call. The result
    does not depend on how the text is split into pieces. Use one parser per output.

    family: a name of `FAMILIES`.
    tools: the tools that were given to the chat template. Their schemas distinguish numbers from strings in values
        between tags, and calls from other JSON objects where the format has no marker.
    prompt: the rendered prompt. If it ends with the text that begins reasoning, the output begins with reasoning.
    reads_calls: whether to read calls; without, only reasoning is read apart from content.

    Raises ParameterError for an unknown family, for invalid tools and for text after `finish`; never for an output.
    """

    def __init__(
        self, family: str | Family, tools: Sequence[Any] | None = None, prompt: str = "", *, reads_calls: bool = True
    ) -> None:
        self.family = family if isinstance(family, Family) else get_family(family)
        if not reads_calls:
            self.family = replace(self.family, formats=())
        self._cursor = Cursor()
        schemas = None if tools is None else parameter_schemas(tools)
        self._reader = _Reader(self._cursor, schemas, self.family.short_ids)
        self._content, self._reasoning = _WhiteSpaceFilter(Content), _WhiteSpaceFilter(Reasoning)
        thinking = self.family.thinking
        opened = thinking is not None and prompt.rstrip().endswith(thinking[0])
        self._steps = self._read_output(opened)

    def feed(self, text: str) -> list[Event]:
        """Add a piece of the output. Returns the events that are now certain; a call is one event."""
        if self._cursor.ended:
            raise ParameterError("the parser was finished; make one for each output.")
        if not text:
            return []
        self._cursor.text += text
        return self._advance()

    def finish(self) -> list[Event]:
        """End the output. Returns the remaining events."""
        self._cursor.ended = True
        events = self._advance()
        if self._content.held and not self._content.drops:
            events.append(Content(self._content.held))
        return join_neighbours(events)

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for step in self._steps:
            if step is None:
                break
            events += self._filter_space(step)
        return join_neighbours(events)

    def _filter_space(self, step: Event | MessageEnd) -> list[Event]:
        if isinstance(step, Content):
            return self._content.add_text(step.text)
        if isinstance(step, Reasoning):
            return self._reasoning.add_text(step.text)
        if isinstance(step, MessageEnd):
            self._content.end_message()
            self._reasoning.end_message()
            return []
        self._content.drops, self._content.strips = True, False
        return [step]

    def _read_output(self, opened: bool) -> Reading:
        cursor, family = self._cursor, self.family
        if family.thinking:
            begin = cursor.at
            if not opened:
                yield from cursor.skip_space()
                opened = bool((yield from cursor.accept(family.thinking[0])))
                cursor.at = cursor.at if opened else begin
            if opened:
                yield from cursor.stream_until(Reasoning, family.thinking[1])
                self._content.held, self._content.strips = "", True
        yield from self._read_after("", cursor.at)
        while opener := (yield from self._read_to_opener()):
            begin = cursor.at
            if not (yield from self._read_after(opener, begin)):
                cursor.at = begin + len(opener)
                yield Content(opener)

    def _read_after(self, opener: str, begin: int) -> Generator[Event | MessageEnd | None, None, bool]:
        """Try the readers of the text after `opener`, which is at `begin`. Returns whether one fits.

        After a mismatch, moves the cursor back to the end of the last event.
        """
        cursor, done = self._cursor, begin
        for reading in self._readings(opener):
            cursor.at = begin + len(opener)
            try:
                for step in reading:
                    if step is not None:
                        done = cursor.at
                    yield step
            except Mismatch:
                cursor.at = done
                if done > begin:
                    return True
            else:
                return True
        return False

    def _readings(self, opener: str) -> Iterator[Reading]:
        """The ways to read the text after an opener, "" at the answer's start, in the order in which they are tried."""
        family, reader = self.family, self._reader
        if family.channels:
            yield reader.message(opener)
            return
        yield from (reader.calls(form) for form in family.formats if form.opener == opener)
        if family.thinking and family.rethinks and opener == family.thinking[0]:
            yield self._cursor.stream_until(Reasoning, family.thinking[1])

    def _read_to_opener(self) -> Generator[Event | None, None, str]:
        """Yield content up to the next opener. Returns the opener, or "" at the end of the text."""
        cursor, openers = self._cursor, self.family.openers
        pattern = pattern_of(openers)
        while True:
            cursor.drop_read_text()
            found = pattern.search(cursor.text)
            end = found.start() if found else len(cursor.text) - unfinished_length(openers, cursor.text)
            if end:
                cursor.at = end
                yield Content(cursor.text[:end])
            if found:
                return found[0]
            if not (yield from cursor.wait_for_more()):
                cursor.at = len(cursor.text)
                yield Content(cursor.text[end:])
                return ""


class _WhiteSpaceFilter:
    """Removes the white space that separates content or reasoning from other parts of an output.

    held: white space that counts only if text follows.
    strips: whether to remove white space before the next text.
    drops: whether to remove white space at the end of the output.
    """

    def __init__(self, event: type[Content] | type[Reasoning]) -> None:
        self.event, self.held, self.has_text = event, "", False
        self.strips = self.drops = event is Reasoning

    def add_text(self, text: str) -> list[Event]:
        """Add text. Returns its event, without white space at its end, which is held until more text follows."""
        text = self.held + (text.lstrip() if self.strips else text)
        kept = text.rstrip()
        self.held = text[len(kept) :]
        if not kept:
            return []
        self.strips, self.has_text, self.drops = False, True, self.event is Reasoning
        return [self.event(kept)]

    def end_message(self) -> None:
        """Join the text of the next message with a line end."""
        self.held, self.drops, self.strips = "\n" if self.has_text else "", True, not self.has_text


def parse(text: str, family: str | Family, tools: Sequence[Any] | None = None, prompt: str = "") -> Parsed:
    """Parse a whole output. Parameters and errors are those of `ToolCallParser`."""
    parser = ToolCallParser(family, tools, prompt)
    return Parsed.of([*parser.feed(text), *parser.finish()])


def marked_text(result: GenerationResult, tokenizer: Tokenizer, family: Family) -> str:
    """The result's text with the markers of `family`, but without other special tokens, stop token and stop string.

    `GenerationResult.text` leaves out special tokens, and in many tokenizers the markers of calls are special tokens.
    """
    special = tokenizer.special_ids
    if not any(text in family.markers for text in special.values()):
        return result.text
    ids = [token for token in result.token_ids if special.get(token, family.markers[0]) in family.markers]
    if not (result.finish_reason == "stop" and isinstance(result.stop, str)):
        return tokenizer.decode(ids[:-1] if ids[-1:] == [result.stop] else ids, False)
    # The last token completed the stop string.
    text, last = tokenizer.decode(ids, False), len(tokenizer.decode(ids[:-1], False))
    found = text.find(result.stop, max(0, last - len(result.stop) + 1))
    return text if found < 0 else text[:found]

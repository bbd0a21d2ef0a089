"""Parses a model's output while it arrives."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.results import GenerationResult
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.runtime.tools.calls import Break, Content, Event, Parsed, Reasoning, merged
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading, any_of, beginning_of
from topw_deploy.runtime.tools.families import family_named
from topw_deploy.runtime.tools.family import Calls, Family, Reader
from topw_deploy.runtime.tools.schema import parameter_schemas


class ToolCallParser:
    """Splits an output into content, reasoning and tool calls.

    Text that may be the beginning of a call is held back until that is certain. A malformed or truncated call becomes
    content. White space around reasoning is left out, and white space between calls or after the last one. The result
    does not depend on how the text is split into pieces. A parser is for one output.

    family: a name of `FAMILIES`.
    tools: as for the chat template. Their schemas distinguish numbers from strings in the XML form, and calls from
        other JSON objects without a marker.
    prompt: the rendered prompt. If it ends with the marker of reasoning, the output begins with reasoning.

    Raises ParameterError for an unknown family, for invalid tools and for text after `finish`; never for an output.
    """

    def __init__(self, family: str | Family, tools: Sequence[Any] | None = None, prompt: str = "") -> None:
        self.family = family if isinstance(family, Family) else family_named(family)
        self._calls = Calls(None if tools is None else parameter_schemas(tools), self.family.new_id)
        self._cursor = Cursor()
        self._content, self._reasoning = _Layout(Content), _Layout(Reasoning)
        thinking = self.family.thinking
        opened = thinking is not None and prompt.rstrip().endswith(thinking[0])
        self._steps = self._read(opened)

    def feed(self, text: str) -> list[Event]:
        """Add a piece. Returns what is certain now; a call is one event."""
        if self._cursor.ended:
            raise ParameterError("the parser was finished; make one for each output.")
        if not text:
            return []
        self._cursor.text += text
        return self._advance()

    def finish(self) -> list[Event]:
        """End the output. Returns the rest."""
        self._cursor.ended = True
        return merged([*self._advance(), *self._content.finish()])

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for step in self._steps:
            if step is None:
                break
            events += self._laid_out(step)
        return merged(events)

    def _laid_out(self, step: Event | Break) -> list[Event]:
        if isinstance(step, Content):
            return self._content.text(step.text)
        if isinstance(step, Reasoning):
            return self._reasoning.text(step.text)
        if isinstance(step, Break):
            self._content.end_message()
            self._reasoning.end_message()
            return []
        self._content.end_with_call()
        return [step]

    def _read(self, opened: bool) -> Reading:
        cursor, family = self._cursor, self.family
        if family.thinking:
            begin = cursor.at
            if not opened:
                yield from cursor.space()
                opened = bool((yield from cursor.accept(family.thinking[0])))
                cursor.at = cursor.at if opened else begin
            if opened:
                yield from cursor.stream(Reasoning, family.thinking[1])
                self._content.strip_next()
        if family.start is not None:
            begin = cursor.at
            yield from cursor.space()
            yield from self._attempt(family.start, begin)
        while opener := (yield from self._until_opener()):
            begin = cursor.at
            cursor.at += len(opener)
            if not (yield from self._attempt(family.openers[opener], begin)):
                cursor.at = begin + len(opener)
                yield Content(opener)

    def _attempt(self, reader: Reader, begin: int) -> Generator[Event | Break | None, None, bool]:
        """Run `reader`. Returns whether it found something; after a mismatch, go back to the end of what it found."""
        cursor, done = self._cursor, begin
        try:
            for step in reader(cursor, self._calls):
                if step is not None:
                    done = cursor.at
                yield step
        except Mismatch:
            cursor.at = done
            return done > begin
        return True

    def _until_opener(self) -> Generator[Event | None, None, str]:
        """Yield content. Returns the opener at the cursor, or "" at the end of the text."""
        cursor, openers = self._cursor, tuple(self.family.openers)
        pattern = any_of(openers)
        while True:
            cursor.drop_done()
            found = pattern.search(cursor.text)
            end = found.start() if found else len(cursor.text) - beginning_of(openers, cursor.text)
            if end:
                cursor.at = end
                yield Content(cursor.text[:end])
            if found:
                return found[0]
            if not (yield from cursor.more()):
                cursor.at = len(cursor.text)
                yield Content(cursor.text[end:])
                return ""


class _Layout:
    """Leaves out the white space that separates text from calls and reasoning."""

    def __init__(self, event: type[Content] | type[Reasoning]) -> None:
        self._event = event
        self._held = ""  # white space that is text only if text follows
        self._strip = event is Reasoning
        self._any = False
        self._closed = event is Reasoning  # white space at the end is no text

    def text(self, text: str) -> list[Event]:
        text = self._held + (text.lstrip() if self._strip else text)
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not kept:
            return []
        self._strip, self._any, self._closed = False, True, self._event is Reasoning
        return [self._event(kept)]

    def strip_next(self) -> None:
        self._held, self._strip = "", True

    def end_with_call(self) -> None:
        self._closed, self._strip = True, False

    def end_message(self) -> None:
        """Messages are joined by a line end."""
        self._held, self._closed, self._strip = "\n" if self._any else "", True, not self._any

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [self._event(held)] if held and not self._closed else []


def parse(text: str, family: str | Family, tools: Sequence[Any] | None = None, prompt: str = "") -> Parsed:
    """Parse a whole output. See `ToolCallParser`."""
    parser = ToolCallParser(family, tools, prompt)
    return Parsed.of([*parser.feed(text), *parser.finish()])


def marked_text(result: GenerationResult, tokenizer: Tokenizer, family: Family) -> str:
    """The result's text with `family`'s markers, but without other special tokens, end of sequence and stop string.

    `GenerationResult.text` leaves out special tokens, and in many tokenizers the markers of calls are special.
    """
    special = tokenizer.special_ids
    if not any(text in family.markers for text in special.values()):
        return result.text
    ids = [token for token in result.token_ids if special.get(token, family.markers[0]) in family.markers]
    if result.finish_reason == "stop" and isinstance(result.stop, str):
        return _cut(tokenizer, ids, result.stop)
    return tokenizer.decode(ids[:-1] if ids[-1:] == [result.stop] else ids, False)


def _cut(tokenizer: Tokenizer, ids: list[int], stop: str) -> str:
    """Cut at the stop string, which the last token completed."""
    text = tokenizer.decode(ids, False)
    last = len(tokenizer.decode(ids[:-1], False))
    found = text.find(stop, max(0, last - len(stop) + 1))
    return text if found < 0 else text[:found]

"""Parses a model's output while it arrives."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.results import GenerationResult
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.runtime.tools.calls import Content, Event, MessageEnd, Parsed, Reasoning, join_neighbours
from topw_deploy.runtime.tools.cursor import Cursor, Mismatch, Reading, pattern_of, unfinished_length
from topw_deploy.runtime.tools.families import get_family
from topw_deploy.runtime.tools.family import CallFactory, Family, Reader
from topw_deploy.runtime.tools.schema import parameter_schemas


class ToolCallParser:
    """Splits an output into content, reasoning and tool calls.

    Text that may be the beginning of a call is held back until it is known to be one or not. A malformed or truncated
    call becomes content. White space is left out around reasoning, between calls and after the last call. The result
    does not depend on how the text is split into pieces. Use one parser per output.

    family: a name of `FAMILIES`.
    tools: the tools that were given to the chat template. Their schemas distinguish numbers from strings in values
        between tags, and calls from other JSON objects where the format has no marker.
    prompt: the rendered prompt. If it ends with the text that begins reasoning, the output begins with reasoning.

    Raises ParameterError for an unknown family, for invalid tools and for text after `finish`; never for an output.
    """

    def __init__(self, family: str | Family, tools: Sequence[Any] | None = None, prompt: str = "") -> None:
        self.family = family if isinstance(family, Family) else get_family(family)
        self._factory = CallFactory(None if tools is None else parameter_schemas(tools), self.family.new_id)
        self._cursor = Cursor()
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
        return join_neighbours([*self._advance(), *self._content.finish()])

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
        self._content.record_call()
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
                self._content.strip_next()
        if family.start is not None:
            begin = cursor.at
            yield from cursor.skip_space()
            yield from self._try_reader(family.start, begin)
        while opener := (yield from self._read_to_opener()):
            begin = cursor.at
            cursor.at += len(opener)
            if not (yield from self._try_reader(family.openers[opener], begin)):
                cursor.at = begin + len(opener)
                yield Content(opener)

    def _try_reader(self, reader: Reader, begin: int) -> Generator[Event | MessageEnd | None, None, bool]:
        """Run `reader`, whose text begins at `begin`. Returns whether it yielded an event.

        After a mismatch, moves the cursor back to the end of the reader's last event.
        """
        cursor, done = self._cursor, begin
        try:
            for step in reader(cursor, self._factory):
                if step is not None:
                    done = cursor.at
                yield step
        except Mismatch:
            cursor.at = done
            return done > begin
        return True

    def _read_to_opener(self) -> Generator[Event | None, None, str]:
        """Yield content up to the next opener. Returns the opener, or "" at the end of the text."""
        cursor, openers = self._cursor, tuple(self.family.openers)
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

    event: the kind of text.
    """

    def __init__(self, event: type[Content] | type[Reasoning]) -> None:
        self._event = event
        self._held_space = ""  # white space that counts only if text follows
        self._strips_next = event is Reasoning  # whether to remove white space before the next text
        self._has_text = False
        self._drops_last = event is Reasoning  # whether to remove white space at the end of the output

    def add_text(self, text: str) -> list[Event]:
        """Add text. Returns its event, without white space at its end, which is held until more text follows."""
        text = self._held_space + (text.lstrip() if self._strips_next else text)
        kept = text.rstrip()
        self._held_space = text[len(kept) :]
        if not kept:
            return []
        self._strips_next, self._has_text, self._drops_last = False, True, self._event is Reasoning
        return [self._event(kept)]

    def strip_next(self) -> None:
        """Remove white space before the next text."""
        self._held_space, self._strips_next = "", True

    def record_call(self) -> None:
        """Record that a call follows the text."""
        self._drops_last, self._strips_next = True, False

    def end_message(self) -> None:
        """Join the text of the next message with a line end."""
        self._held_space, self._drops_last = "\n" if self._has_text else "", True
        self._strips_next = not self._has_text

    def finish(self) -> list[Event]:
        """Returns the event of white space at the end of the output, if it counts."""
        space, self._held_space = self._held_space, ""
        return [self._event(space)] if space and not self._drops_last else []


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
    if result.finish_reason == "stop" and isinstance(result.stop, str):
        return _text_before_stop(tokenizer, ids, result.stop)
    return tokenizer.decode(ids[:-1] if ids[-1:] == [result.stop] else ids, False)


def _text_before_stop(tokenizer: Tokenizer, ids: list[int], stop: str) -> str:
    """The text of `ids` before the stop string, which the last token completed."""
    text = tokenizer.decode(ids, False)
    last = len(tokenizer.decode(ids[:-1], False))
    found = text.find(stop, max(0, last - len(stop) + 1))
    return text if found < 0 else text[:found]

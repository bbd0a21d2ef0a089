"""Prompts from a file: one a line, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import PromptError
from topw_deploy.plain_text import decode_text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's text, and where it stands, for messages."""

    text: str
    where: str


def prompts_of_lines(data: bytes, where: str) -> list[Prompt]:
    """One prompt a line; empty lines do not count. Raises PromptError for data that is no text or has no prompt."""
    return _some([Prompt(line, f"line {number} of {where}") for number, line in numbered_lines(data, where)], where)


def prompts_of_json_lines(data: bytes, where: str) -> list[Prompt]:
    """One JSON value a line: a text, or an object with a text called `prompt`. Raises PromptError."""
    found = []
    for number, line in numbered_lines(data, where):
        place = f"line {number} of {where}"
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise PromptError(f'{place} is not JSON; write "text" or {{"prompt": "text"}} on each line.') from None
        text = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise PromptError(f'{place} holds no prompt; write "text" or {{"prompt": "text"}} on each line.')
        found.append(Prompt(text, place))
    return _some(found, where)


def numbered_lines(data: bytes, where: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1. Only line feeds end one: other breaks are text.

    Raises PromptError for data that is not UTF-8 text.
    """
    for number, line in enumerate(decode_text(data, where).split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _some(prompts: list[Prompt], where: str) -> list[Prompt]:
    if not prompts:
        raise PromptError(f"{where} holds no prompt; write one on each line.")
    return prompts

"""vLLM's `bad_words`: texts whose token ids are never completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import PARAMETERS, show
from topw_deploy.runtime.tokenizer import Tokenizer

NAME, IDS = "bad_words", "bad_words_ids"


def as_ids(given: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Replace `bad_words` among a request's parameters by `bad_words_ids`.

    A word is banned as the tokenizer spells it at the start of a text, and behind a space.

    Raises ParameterError for other values than texts, a text without tokens, or both names.
    """
    if NAME not in given:
        return dict(given)
    if IDS in given:
        raise ParameterError(f"{NAME} and {IDS} are both given; give one of them.", NAME)
    others = {name: value for name, value in given.items() if name != NAME}
    value, parameter = given[NAME], PARAMETERS[NAME]
    if parameter.is_per_row(value):
        rows = [None if v is None else _spelled(parameter.parse(NAME, v), tokenizer) for v in value]
        return {**others, IDS: rows}
    return {**others, IDS: _spelled(parameter.parse(NAME, value), tokenizer)}


def _spelled(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], None] = {}  # ordered
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ParameterError(f"{NAME} has {show(word)}, which has no tokens; remove it.", NAME)
            found[ids] = None
    return tuple(found)

"""Read prompts from JSON lines; all are checked before any is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.plain_text import numbered_lines

KINDS = ("prompt", "prompt_ids", "messages")
_ALIASES = {"token_ids": "prompt_ids"}
_OWN = ("id", *KINDS)
_OBJECTS = frozenset({"generation_config", "streamer", "stopping_criteria"})  # Python objects, not JSON values
_FORM = 'write "text", {"prompt": "text"}, {"prompt_ids": [1, 2]} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt.

    index: position in the file, from 0, not counting blank lines.
    where: the line, for messages.
    parameters: checked parameters of the line and the command line.
    """

    index: int
    where: str
    id: str | int | None
    kind: str
    prompt: Any
    parameters: Mapping[str, Any]

    @property
    def samples(self) -> int:
        """Number of sequences requested."""
        return int(self.parameters.get("num_return_sequences", 1))

    def request(self, limits: Mapping[str, Any]) -> str:
        """Digest of everything that determines the answer, except model and seed."""
        asked = [self.id, self.kind, self.prompt, self.parameters, limits]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, default=asdict).encode()).hexdigest()[:32]


def prompt_lines(
    data: bytes, where: str, given: Mapping[str, Any], *, chat: bool, system: str | None
) -> list[PromptLine]:
    """Read the prompts of a file.

    given: parameters for all prompts, which those of a line override.
    chat: a text is the user's message, after the system message `system`.
    Raises ParameterError for an invalid `given`, PromptError for a malformed line or a file without prompts.
    """
    checked = _checked(given)
    found: list[PromptLine] = []
    for number, text in numbered_lines(data, where):
        place = f"line {number} of {where}"
        value = _object(text, place)
        try:
            kind, prompt = _prompt(value)
            own = _checked({name: v for name, v in value.items() if name not in (*_OWN, *_ALIASES)})
            _check_together(own)
        except (ParameterError, PromptError) as error:
            raise PromptError(f"{place}: {error}") from None
        if chat and kind == "prompt":
            kind, prompt = "messages", user_messages(system, prompt)
        found.append(PromptLine(len(found), place, value.get("id"), kind, prompt, _merged(checked, own)))
    if not found:
        raise PromptError(f"{where} holds no prompt; {_FORM} on each line.")
    return found


def user_messages(system: str | None, text: str) -> list[dict[str, str]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": text}]


def _object(text: str, place: str) -> dict[str, Any]:
    """Parse a line; a string becomes an object with that prompt."""
    try:
        value: Any = json.loads(text, object_pairs_hook=_without_repetition)
    except PromptError as error:
        raise PromptError(f"{place} {error}") from None
    except (ValueError, RecursionError):
        raise PromptError(f"{place} is not JSON; {_FORM} on each line.") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise PromptError(f"{place} is neither a text nor an object; {_FORM}.")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError(f"{place} has half of a surrogate pair, which is not a character; remove it.") from None
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise PromptError(f"has {name!r:.60} twice; remove one of them.")
        result[name] = value
    return result


def _prompt(value: dict[str, Any]) -> tuple[str, Any]:
    if not isinstance(value.get("id"), (str, int, type(None))) or isinstance(value.get("id"), bool):
        raise PromptError(f"id is {value['id']!r:.60}, but must be a text or an integer.")
    given = [name for name in (*KINDS, *_ALIASES) if name in value]
    if len(given) != 1:
        count = " and ".join(given) if given else "no prompt"
        raise PromptError(f"{count} given; {_FORM}.")
    kind, prompt = _ALIASES.get(given[0], given[0]), value[given[0]]
    if kind == "prompt" and not isinstance(prompt, str):
        raise PromptError(f"prompt is {prompt!r:.60}, but must be a text; give token ids as prompt_ids.")
    if kind == "prompt_ids" and not _are(prompt, int):
        raise PromptError(f"{given[0]} is {prompt!r:.60}, but must be a list of integers.")
    if kind == "messages" and not (_are(prompt, dict) and prompt):
        raise PromptError(f"messages is {prompt!r:.60}, but must be a list of objects with role and content.")
    return kind, prompt


def _are(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the parameters of one row; returns them by canonical name."""
    # Import late, so that a bad file is refused without waiting for onnxruntime.
    from topw_deploy.runtime.parameters import PARAMETERS, REQUEST_PARAMETERS, check_names

    known = {**PARAMETERS, **REQUEST_PARAMETERS}
    named = check_names(given)
    for name in _OBJECTS & named.keys():
        raise ParameterError(f"{name} is not allowed here; give each parameter by its own name.")
    return {name: known[name].parse(name, value) for name, value in named.items()}


def _check_together(own: Mapping[str, Any]) -> None:
    if "max_new_tokens" in own and "max_length" in own:
        raise ParameterError("max_new_tokens and max_length are both given; give one of them.")


def _merged(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    replaced = "max_new_tokens" if "max_length" in own else None  # two names for one limit
    return {**{name: value for name, value in given.items() if name != replaced}, **own}

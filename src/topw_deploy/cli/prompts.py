"""Read prompts from JSON lines. All lines are checked before any prompt is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.text import numbered_lines

KINDS = ("prompt", "prompt_ids", "messages")
_KIND_ALIASES = {"token_ids": "prompt_ids"}
_OWN_FIELDS = ("id", *KINDS)
_EXPECTED = 'write "text", {"prompt": "text"}, {"prompt_ids": [1, 2]} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a file.

    index: position in the file, counted from 0 without blank lines.
    where: the place of the line, for error messages.
    id: the prompt's id in the file; None without.
    kind: one of KINDS.
    prompt: the text, the token ids or the messages.
    parameters: checked parameters of `TopWModel.generate`, from the line and from the command line.
    answers: the accepted answers; empty without.
    """

    index: int
    where: str
    id: str | int | None
    kind: str
    prompt: Any
    parameters: Mapping[str, Any]
    answers: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Number of sequences that the parameters ask for."""
        return int(self.parameters.get("num_return_sequences", 1))

    def digest(self, limits: Mapping[str, Any]) -> str:
        """A digest of everything that determines the answer, except model and seed.

        limits: options of the command line that limit the answer.
        """
        content = [self.id, self.kind, self.prompt, self.parameters, limits]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=asdict).encode()).hexdigest()[:32]


def read_prompt_lines(
    data: bytes, where: str, given: Mapping[str, Any], *, chat: bool, system: str | None, scored: bool = False
) -> list[PromptLine]:
    """Read the prompts of a file.

    where: the file's name, for error messages.
    given: parameters for all prompts. The parameters of a line override them.
    chat: whether a text is the user's message, after the system message `system`.
    scored: whether a line may have `answers`.

    Raises ParameterError for an invalid `given`, PromptError for a malformed line or a file without prompts.
    """
    common = _check_parameters(given)
    lines: list[PromptLine] = []
    for number, text in numbered_lines(data, where):
        place = f"line {number} of {where}"
        value = _parse_object(text, place)
        try:
            kind, prompt = _kind_and_prompt(value)
            answers = _answers(value) if scored else ()
            own = _check_parameters({n: v for n, v in value.items() if n not in (*_OWN_FIELDS, *_KIND_ALIASES)})
            if "max_new_tokens" in own and "max_length" in own:
                raise ParameterError("max_new_tokens and max_length are both given; give one of them.")
        except (ParameterError, PromptError) as error:
            raise PromptError(f"{place}: {error}") from None
        if chat and kind == "prompt":
            kind, prompt = "messages", user_messages(system, prompt)
        parameters = {**common, **own}
        if "max_length" in own:
            parameters.pop("max_new_tokens", None)  # they exclude each other
        lines.append(PromptLine(len(lines), place, value.get("id"), kind, prompt, parameters, answers))
    if not lines:
        raise PromptError(f"{where} holds no prompt; {_EXPECTED} on each line.")
    return lines


def read_text_lines(data: bytes, where: str, *, chat: bool = False, system: str | None = None) -> list[PromptLine]:
    """Read the prompts of a text file: one on each line that is not blank; as in `read_prompt_lines`."""
    texts = [(text, f"line {number} of {where}") for number, text in numbered_lines(data, where)]
    if not texts:
        raise PromptError(f"{where} holds no prompt; write one on each line.")
    return text_lines(texts, chat=chat, system=system)


def text_lines(texts: Iterable[tuple[str, str]], *, chat: bool, system: str | None) -> list[PromptLine]:
    """Make a prompt of each text, without parameters of its own.

    texts: each text, and where it stands, for messages.
    chat: whether a text is a user's message, behind the message `system` if there is one.
    """
    kind, made = ("messages", lambda text: user_messages(system, text)) if chat else ("prompt", str)
    return [PromptLine(index, place, None, kind, made(text), {}) for index, (text, place) in enumerate(texts)]


def user_messages(system: str | None, text: str) -> list[dict[str, str]]:
    """The messages of a chat that starts with `text`, after the system message `system` (None: no such message)."""
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    return [*system_messages, {"role": "user", "content": text}]


def _parse_object(text: str, place: str) -> dict[str, Any]:
    """Parse a line. A string becomes an object with that prompt."""
    try:
        value: Any = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        raise PromptError(f"{place} is not JSON; {_EXPECTED} on each line.") from None
    if not isinstance(value, (str, dict)):
        raise PromptError(f"{place} is neither a text nor an object; {_EXPECTED}.")
    return {"prompt": value} if isinstance(value, str) else value


def _kind_and_prompt(value: dict[str, Any]) -> tuple[str, Any]:
    """The kind of a line's prompt and the prompt. Raises PromptError for a wrong prompt or id."""
    if not isinstance(value.get("id"), (str, int, type(None))) or isinstance(value.get("id"), bool):
        raise PromptError(f"id is {value['id']!r:.60}, but must be a text or an integer.")
    names = [name for name in (*KINDS, *_KIND_ALIASES) if name in value]
    if len(names) != 1:
        raise PromptError(f"{' and '.join(names) or 'no prompt'} given; {_EXPECTED}.")
    kind, prompt = _KIND_ALIASES.get(names[0], names[0]), value[names[0]]
    if kind == "prompt" and not isinstance(prompt, str):
        raise PromptError(f"prompt is {prompt!r:.60}, but must be a text; give token ids as prompt_ids.")
    if kind == "prompt_ids" and not _is_list_of(prompt, int):
        raise PromptError(f"{names[0]} is {prompt!r:.60}, but must be a list of integers.")
    if kind == "messages" and not (_is_list_of(prompt, dict) and prompt):
        raise PromptError(f"messages is {prompt!r:.60}, but must be a list of objects with role and content.")
    return kind, prompt


def _answers(value: dict[str, Any]) -> tuple[str, ...]:
    """Take the accepted answers from a line. Raises PromptError unless they are texts."""
    answers = value.pop("answers", [])
    if not _is_list_of(answers, str) or not all(answer.strip() for answer in answers):
        raise PromptError(f"answers is {answers!r:.60}, but must be a list of texts, any of which is right.")
    return tuple(answers)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _check_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check parameters, each by itself. Returns them by their canonical names."""
    # Import late, so that a file that cannot be read is refused without waiting for onnxruntime.
    from topw_deploy.runtime.parameters import PARAMETERS, read_values

    for name in given:
        if name in PARAMETERS and "json" not in PARAMETERS[name].places:
            raise ParameterError(f"{name} is not allowed here; give each parameter by its own name.")
    return read_values(given)

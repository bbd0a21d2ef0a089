"""The prompts and settings of `topw stats`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.plain_text import numbered_lines
from topw_deploy.sampling.beta import depends_on_temperature
from topw_deploy.sampling.parameters import ALIASES, PARAMETER_NAMES, check_range, unknown_name
from topw_deploy.sampling.rules import RULE_OF_VALUE, RuleParameters

_SWEPT = (*PARAMETER_NAMES, *RULE_OF_VALUE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its location for messages."""

    text: str
    where: str


def prompts_of_lines(data: bytes, where: str) -> list[Prompt]:
    """One prompt per non-blank line. Raises PromptError if `data` is not text or has no prompt."""
    return _not_empty(
        [Prompt(line, f"line {number} of {where}") for number, line in numbered_lines(data, where)], where
    )


def prompts_of_json_lines(data: bytes, where: str) -> list[Prompt]:
    """One JSON value per line: a string, or an object with the string `prompt`. Raises PromptError otherwise."""
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
    return _not_empty(found, where)


def _not_empty(prompts: list[Prompt], where: str) -> list[Prompt]:
    if not prompts:
        raise PromptError(f"{where} holds no prompt; write one on each line.")
    return prompts


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of one run: Top-W's, the rule and the rule's.

    label: the parameters that differ between settings.
    """

    label: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExactRequest:
    """What to analyse under the exact objective.

    steps: maximum number of steps per setting, evenly spaced over its texts.
    pool: F is computed among this many likeliest tokens, at least the export's top_m; None for top_m.
    """

    steps: int = 200
    pool: int | None = None


def settings_of(given: Mapping[str, Any], sweeps: Sequence[str]) -> list[Setting]:
    """One setting for each combination of `sweeps`, such as "temperature=0.5,1,2", added to `given`.

    Raises ParameterError for a sweep of another form, or a name that is unknown, repeated or in `given`.
    """
    columns: dict[str, list[Any]] = {}
    for text in sweeps:
        name, values = _sweep(text)
        if name in columns:
            raise ParameterError(f"{name} is swept twice; give all its values in one --sweep.", name, "sweep")
        if name in given:
            raise ParameterError(f"{name} is given as an option and swept; remove one of them.", name, "sweep")
        columns[name] = values
    found = []
    for combination in itertools.product(*columns.values()):
        chosen = dict(zip(columns, combination, strict=True))
        label = ", ".join(f"{name} {_shown(value)}" for name, value in chosen.items())
        found.append(Setting(label, {**given, **chosen}))
    return found


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = ALIASES.get(name, name)
    if equals and name not in _SWEPT:
        error = unknown_name(name, _SWEPT)
        raise ParameterError(str(error), "sweep")
    try:
        found = list(dict.fromkeys(_swept(name, value) for value in values.split(",")))
    except ValueError:
        raise ParameterError(
            f"the sweep {text!r} is not NAME=NUMBER,NUMBER,...; write for example temperature=0.5,1,2.",
            "sweep",
        ) from None
    for value in found:
        try:
            if name in RULE_OF_VALUE:
                given: dict[str, Any] = {name: value}
                RuleParameters(**given)
            elif not isinstance(value, str):
                check_range(name, value)
        except ParameterError as error:
            raise ParameterError(str(error), "sweep") from None
    return name, found


def _swept(name: str, value: str) -> float | str:
    """A number, or the text of a `beta` that depends on the temperature. Raises ValueError for other text."""
    try:
        return float(value)
    except ValueError:
        if name == "beta" and depends_on_temperature(value):
            return value.strip()
        raise

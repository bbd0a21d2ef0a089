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
class TextPrompt:
    """A prompt.

    where: the place of the prompt in its source, for error messages.
    """

    text: str
    where: str


def prompts_of_lines(data: bytes, where: str) -> list[TextPrompt]:
    """One prompt per non-blank line. Raises PromptError if `data` is not text or has no prompt."""
    return _require_prompts(
        [TextPrompt(line, f"line {number} of {where}") for number, line in numbered_lines(data, where)], where
    )


def prompts_of_json_lines(data: bytes, where: str) -> list[TextPrompt]:
    """One JSON value per line: a string, or an object with the string `prompt`. Raises PromptError otherwise."""
    prompts = []
    for number, line in numbered_lines(data, where):
        place = f"line {number} of {where}"
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise PromptError(f'{place} is not JSON; write "text" or {{"prompt": "text"}} on each line.') from None
        text = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise PromptError(f'{place} holds no prompt; write "text" or {{"prompt": "text"}} on each line.')
        prompts.append(TextPrompt(text, place))
    return _require_prompts(prompts, where)


def _require_prompts(prompts: list[TextPrompt], where: str) -> list[TextPrompt]:
    if not prompts:
        raise PromptError(f"{where} holds no prompt; write one on each line.")
    return prompts


@dataclass(frozen=True, slots=True)
class Setting:
    """The sampling parameters of one run.

    label: names and values of the parameters that differ between settings.
    parameters: parameters of Top-W, the sampling rule, and parameters of that rule.
    """

    label: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExactRequest:
    """Which steps to analyse under the exact objective F.

    steps: maximum number of steps per setting; they are evenly spaced over the texts of the setting.
    pool: F is computed among this many likeliest tokens, at least the export's top_m. None: top_m.
    """

    steps: int = 200
    pool: int | None = None


def settings_of(given: Mapping[str, Any], sweeps: Sequence[str]) -> list[Setting]:
    """Combine the parameters `given` with every combination of the swept values, one setting each.

    sweeps: texts such as "temperature=0.5,1,2".

    Raises ParameterError for a sweep of another form, or a name that is unknown, swept twice or in `given`.
    """
    columns: dict[str, list[Any]] = {}
    for text in sweeps:
        name, values = _parse_sweep(text)
        if name in columns:
            raise ParameterError(f"{name} is swept twice; give all its values in one --sweep.", name, "sweep")
        if name in given:
            raise ParameterError(f"{name} is given as an option and swept; remove one of them.", name, "sweep")
        columns[name] = values
    settings = []
    for combination in itertools.product(*columns.values()):
        swept = dict(zip(columns, combination, strict=True))
        label = ", ".join(f"{name} {_value_text(value)}" for name, value in swept.items())
        settings.append(Setting(label, {**given, **swept}))
    return settings


def _value_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _parse_sweep(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = ALIASES.get(name, name)
    if equals and name not in _SWEPT:
        error = unknown_name(name, _SWEPT)
        raise ParameterError(str(error), "sweep")
    try:
        parsed = list(dict.fromkeys(_parse_value(name, value) for value in values.split(",")))
    except ValueError:
        raise ParameterError(
            f"the sweep {text!r} is not NAME=NUMBER,NUMBER,...; write for example temperature=0.5,1,2.",
            "sweep",
        ) from None
    for value in parsed:
        try:
            if name in RULE_OF_VALUE:
                parameter: dict[str, Any] = {name: value}
                RuleParameters(**parameter)  # checks the range
            elif not isinstance(value, str):
                check_range(name, value)
        except ParameterError as error:
            raise ParameterError(str(error), "sweep") from None
    return name, parsed


def _parse_value(name: str, value: str) -> float | str:
    """Return `value` as a number, or stripped if it is a `beta` that depends on the temperature, such as "1.5+1.5*T".

    Raises ValueError for other text.
    """
    try:
        return float(value)
    except ValueError:
        if name == "beta" and depends_on_temperature(value):
            return value.strip()
        raise

"""The parameters that are compared: those given, with every combination of the swept ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.parameters import ALIASES, PARAMETER_NAMES, check_range, unknown_name


@dataclass(frozen=True, slots=True)
class Setting:
    """Top-W parameters of a run, and what to call it beside others: only what differs between them."""

    label: str
    parameters: Mapping[str, float]


def settings_of(given: Mapping[str, float], sweeps: Sequence[str]) -> list[Setting]:
    """`given` with each combination of `sweeps`, texts like "temperature=0.5,1,2".

    Raises ParameterError for a text of another form, an unknown or repeated name, or one that is given as well.
    """
    columns: dict[str, list[float]] = {}
    for text in sweeps:
        name, values = _sweep(text)
        if name in columns:
            raise ParameterError(f"{name} is swept twice; give all its values in one --sweep.", name, "sweep")
        if name in given:
            raise ParameterError(f"{name} is given as an option and swept; leave one of them out.", name, "sweep")
        columns[name] = values
    found = []
    for combination in itertools.product(*columns.values()):
        chosen = dict(zip(columns, combination, strict=True))
        label = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        found.append(Setting(label, {**given, **chosen}))
    return found


def _sweep(text: str) -> tuple[str, list[float]]:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = ALIASES.get(name, name)
    if equals and name not in PARAMETER_NAMES:
        error = unknown_name(name, PARAMETER_NAMES)
        raise ParameterError(str(error), "sweep")
    try:
        numbers = list(dict.fromkeys(float(value) for value in values.split(",")))
    except ValueError:
        raise ParameterError(
            f"the sweep {text!r} is not NAME=NUMBER,NUMBER,...; write for example temperature=0.5,1,2.",
            "sweep",
        ) from None
    for number in numbers:
        try:
            check_range(name, number)
        except ParameterError as error:
            raise ParameterError(str(error), "sweep") from None
    return name, numbers

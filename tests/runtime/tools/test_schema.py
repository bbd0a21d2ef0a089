"""Schemas of functions equal those of transformers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Dict, List, Literal, Optional, Union  # noqa: UP035

import pytest

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.tools import function_schema


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


def plain(city: str, days: int, share: float = 0.5, exact: bool = True) -> dict:
    """Look up the weather.

    It takes
    two lines.

    Args:
        city: The city's name,
            as in: an atlas.
        days: How many.
        share: A part
        exact: Whether

    Returns:
        The weather, per
        day.
    """
    return {}


def nested(
    names: list[str],
    table: dict[str, list[int]],
    pair: tuple[int, str],
    unit: Unit,
    way: Literal["a", "b", 3],
    anything: Any,
    bare: list,
    typed: List,  # noqa: UP006
    mapped: Dict,  # noqa: UP006
    maybe: Optional[int] = None,  # noqa: UP045
    either: Union[int, str] = 0,  # noqa: UP007
    more: list[int] | str | None = None,
) -> str:
    """Do it.

    Args:
        names: n
        table: t
        pair: p
        unit: u
        way: w
        anything: a
        bare: b
        typed: t
        mapped: d
        maybe: m
        either: e
        more: o
    """
    return ""


def choosing(drink: str) -> None:
    """Drink.

    Args:
        drink: What to drink (choices: ["tea", " coffee"])

    Raises:
        ValueError: never
    """


def nothing() -> int:
    """Count."""
    return 0


class Shop:
    def buy(self, item: str) -> Shop:
        """Buy one.

        Args:
            item: What.
        """
        return self


@pytest.mark.parametrize("function", [plain, nested, choosing, nothing, Shop().buy, Shop.buy])
def test_a_schema_equals_transformers_own(function: Callable[..., Any]) -> None:
    utils = pytest.importorskip("transformers.utils")
    assert function_schema(function) == utils.get_json_schema(function)


def taking(hint: Any, described: str | None = "x: it") -> Callable[..., Any]:
    """A function of one argument. described: its docstring's line on the argument."""

    def function(x: Any) -> None: ...

    function.__annotations__ = {} if hint is None else {"x": hint}
    function.__doc__ = None if described is None else f"Do.\n\nArgs:\n    {described}"
    return function


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (taking(int, None), "it has no docstring"),
        (taking(None), "its argument 'x' has no type hint"),
        (taking(int, ""), "its docstring does not describe the argument 'x'"),
        (taking(bytes), "cannot express the type hint <class 'bytes'>"),
        (taking(str, "x: it (choices: a, b)"), "its choices 'a, b' are no JSON list"),
        (max, "max has no JSON schema: its signature is unknown"),
        (type("C", (), {"__call__": lambda self: 0})(), "C has no JSON schema: it has no docstring"),
    ],
)
def test_a_function_without_a_schema_says_why(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        function_schema(function)

"""Chooses what a default run tests of many like cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def broad(*values: Any) -> Any:
    """A case of a long test that only `--broad` runs."""
    return pytest.param(*values, marks=pytest.mark.broad)


def slow(*values: Any) -> Any:
    """A case that `make quick` leaves out, as another of its kind is there."""
    return pytest.param(*values, marks=pytest.mark.slow)


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """`cases` as parameters of a test, of which `make quick` runs every `step`-th. A tuple has several parameters."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [slow(*case) if place % step else pytest.param(*case) for place, case in enumerate(listed)]


def examples(count: int) -> int:
    """`count` examples of a property, for its `@settings`; `make quick` tries a fifth of them."""
    from hypothesis import settings  # takes longer than processes that need the rest

    return max(1, count * settings().max_examples // 100)


def sampled(names: Iterable[str], sample: Collection[str], long: Collection[str] | None = None) -> list[Any]:
    """`names` as parameters of a test. Those outside `sample` are marked long, or broad if they are not in `long`."""

    def of(name: str) -> Any:
        if name in sample:
            return name
        mark = pytest.mark.long if long is None or name in long else pytest.mark.broad
        return pytest.param(name, marks=mark)

    return [of(name) for name in names]

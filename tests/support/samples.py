"""Chooses what a default run tests of many like cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(names: Iterable[str], sample: Collection[str]) -> list[Any]:
    """`names` as parameters of a test; those outside `sample` are marked long."""
    return [name if name in sample else pytest.param(name, marks=pytest.mark.long) for name in names]

"""The sides of a benchmark: the rows of its table, and which of them can run here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.runtime.rule_settings import USUAL

TOP_P, TOP_K, MIN_P = USUAL["top_p"], USUAL["top_k"], USUAL["min_p"]
"""Parameters of the sampling rules that Top-W is compared with."""


@dataclass(frozen=True)
class Side:
    """One implementation that is timed: a row of the table.

    name: name for --peers.
    label: name in the table.
    kind: "ours", "peer" or "yardstick".
    why_not: why the side cannot run here and what to do, as the end of the sentence "the side is ..."; None if it can.
    """

    name: str
    label: str
    kind: str
    why_not: str | None = field(default=None, kw_only=True)


AnySide = TypeVar("AnySide", bound=Side)


def select(sides: Sequence[AnySide], names: Sequence[str], groups: Collection[str]) -> list[AnySide]:
    """The sides in `names`, in the order of `sides`; all sides if `names` is empty.

    A name in `groups` selects every "<group>-..." side. Raises ParameterError for an unknown name.
    """
    known = [side.name for side in sides]
    for name in names:
        if name not in groups and name not in known:
            raise ParameterError(f"{name!r} is not a side of this benchmark; choose from {', '.join(known)}.", "peers")
    prefixes = tuple(f"{name}-" for name in names if name in groups)
    return [side for side in sides if not names or side.name in names or side.name.startswith(prefixes)]


def choose(
    sides: Sequence[AnySide], names: Sequence[str], groups: Collection[str]
) -> tuple[list[AnySide], list[AnySide]]:
    """Select the sides in `names`. Returns (sides to run, sides that cannot run here).

    Raises ParameterError for an unknown name, BenchmarkError for a named side that cannot run.
    """
    selected = select(sides, names, groups)
    for side in selected:
        if names and side.why_not is not None:
            raise BenchmarkError(f"{side.name} was requested, but is {side.why_not}.")
    return [side for side in selected if side.why_not is None], [side for side in selected if side.why_not is not None]


def absences(absent: Iterable[Side]) -> list[tuple[str, str]]:
    """(label, reason) of each side that cannot run here."""
    return [(side.label, str(side.why_not)) for side in absent]


def why_no_native_library() -> str | None:
    """`Side.why_not` of a side that needs the native library; None if the library is here."""
    from topw_deploy.plugins.shared_library import library_path, why_absent

    return None if library_path() is not None else f"not here: {why_absent()}"


def load_processor(path: Path) -> Any:
    """Load the class TopW_LogitsProcessor from the user's copy of the authors' file.

    Raises BenchmarkError for a file without that class.
    """
    os.environ |= {"TOPW_PRINT_PARAMS": "0", "TOPW_PRINT_KEPT": "0"}
    spec = importlib.util.spec_from_file_location("authors_processor", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BenchmarkError(f"{path} is not a Python file; give the path of the authors' logit_processor_w1.py.")
    module: ModuleType = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise BenchmarkError(f"{path} does not load ({message}); give the authors' logit_processor_w1.py.") from error
    if not hasattr(module, "TopW_LogitsProcessor"):
        raise BenchmarkError(f"{path} has no TopW_LogitsProcessor; give the authors' logit_processor_w1.py.")
    return module.TopW_LogitsProcessor

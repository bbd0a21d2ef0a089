"""The code of the section on structured output runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.guide import COMPILE_SECONDS
from topw_deploy.runtime.structured import MOST_CHARACTERS

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "runtime.md"
SECTION = PAGE.read_text(encoding="utf-8").split("### Structured output\n")[1].split("\n## ")[0]


def test_the_code_runs(model: TopWModel, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    exec(block, {"model": model})
    first, *more, last = capsys.readouterr().out.splitlines()
    text, ended = first.rsplit(" ", 1)
    assert ended == "stop"
    assert json.loads(text)["age"] == int(*more)
    assert last in ("yes", "no")


def test_the_limits_are_those_of_the_code() -> None:
    assert f"limits ({MOST_CHARACTERS:,} characters, {COMPILE_SECONDS:.0f} s to compile)" in SECTION

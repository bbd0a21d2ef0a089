"""The code of the engine's page runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import Toy, export

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "engine.md"


def test_the_code_on_the_page_runs(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path / "out", toy, form="grouped")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
        assert capsys.readouterr().out
    assert len(blocks) == 4

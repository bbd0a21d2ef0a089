"""docs/guide/commands.md matches the commands' help."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "guide" / "commands.py"


def test_the_page_of_commands_is_the_commands_own_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    spec = importlib.util.spec_from_file_location("docs_commands", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    commands = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(commands)
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), "run: python docs/guide/commands.py"

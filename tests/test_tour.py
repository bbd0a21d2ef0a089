"""The programs of docs/tour.md print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from topw_deploy.cli.main import topw

PAGE = Path(__file__).parents[1] / "docs" / "tour.md"


def programs() -> list[tuple[str, str]]:
    """The page's programs, each with the output that the page states."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(found) == text.count("```python") == 2
    return found


def test_the_program_of_the_rule_prints_the_stated_crops(capsys: pytest.CaptureFixture[str]) -> None:
    program, output = programs()[0]
    exec(program, {})
    assert capsys.readouterr().out == output


@pytest.mark.slow
def test_the_program_of_the_file_draws_the_stated_token_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(topw, ["export-sampler", "tiny", "out-sampler", "--no-verify"])
    assert made.exit_code == 0, made.output
    program, output = programs()[1]
    assert "topw_deploy" not in program
    capsys.readouterr()
    exec(program, {})
    assert capsys.readouterr().out == output

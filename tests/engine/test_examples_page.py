"""The programs of docs/guide/examples.md run, and do what the page says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_model import Toy, export

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "examples.md"
TEMPLATE = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}\n{% endfor %}a:"


@pytest.fixture
def run(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Runs the program under "Chat", then that under another heading. Returns (their variables, the last output)."""
    export(tmp_path / "out", toy, form="grouped", chat_template=TEMPLATE)
    monkeypatch.chdir(tmp_path)
    sections = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    blocks = {
        name: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for name, text in texts.items()
    }
    assert all(len(found) == 1 for found in blocks.values())
    names: dict[str, Any] = {}

    def run(heading: str) -> tuple[dict[str, Any], str]:
        for name in dict.fromkeys(("Chat", heading)):
            capsys.readouterr()
            exec(blocks[name][0], names)
        return names, capsys.readouterr().out

    return run


def test_a_chat_reuses_its_turns(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    names, out = run("Chat")
    (first, _), (second, of) = re.findall(r"\[(\d+) of (\d+) tokens reused\]", out)
    assert int(first) == 0
    assert 0 < int(second) < int(of)
    assert [one["role"] for one in names["messages"]] == ["user", "assistant"] * 2


def test_the_program_for_cancelling_ends_its_requests(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    """A fast machine may finish a request before its deadline."""
    first, deadline, task = run("Cancelling")[1].splitlines()
    assert first in {"cancelled", "length"}
    assert deadline in {"timeout", "length", "stop"}
    assert task == "None" or task.startswith("GenerationResult(")


def test_a_batch_job_answers_every_prompt(run: Callable[[str], tuple[dict[str, Any], str]], tmp_path: Path) -> None:
    prompts = [f"prompt {i}" for i in range(60)]
    prompts[7] = "x" * 200  # longer than the context
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    run("A batch job")
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in found] == prompts
    assert "200" in found[7]["error"]
    assert all("text" in one for one in found if one["prompt"] != prompts[7])

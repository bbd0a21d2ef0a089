"""The code of the page on tool calls runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.tools.test_model import ids_of, tokenizer_with_markers
from tests.support.toy_model import EOS, Toy, export
from topw_deploy.runtime.tools import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "tools.md"
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
# Prompts of one token, and of 80 with the tool's result.
TEMPLATE = "{% if messages | length == 1 %}a{% else %}{{ 'b' * 80 }}{% endif %}{# <tool_call> #}"


def test_the_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Toy.script(ids_of("<tool_call>", CALL, "</tool_call>", EOS), prompt_tokens=1)
    for step, token in enumerate(ids_of("Yes.", EOS)):
        toy.place[79 + step, token] = 4000
    config = {"eos_token": "</s>", "pad_token": "<pad>"}
    export(tmp_path / "out", toy, tokenizer=tokenizer_with_markers(), chat_template=TEMPLATE, tokenizer_config=config)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out.splitlines() == [
        "Yes.", *(f"Content(text={letter!r})" for letter in "Yes."), "[]",
    ]  # fmt: skip
    assert [message["role"] for message in names["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert names["messages"][2]["content"] == "Sunny in Oslo."


def test_the_page_names_every_family() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(FAMILIES)

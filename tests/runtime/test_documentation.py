from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import FrameType

import pytest

import topw_deploy.runtime
from tests.support.toy_model import Toy, export
from topw_deploy.runtime import TopWModel

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "runtime.md"


def test_the_page_has_the_table_of_parameters() -> None:
    script = runpy.run_path(str(PAGE.with_name("parameters.py")))
    assert script["table"]() in PAGE.read_text("utf-8"), "run python docs/guide/parameters.py"


def test_the_code_on_log_probabilities_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path / "out-with-logits", Toy.random(1), with_logits=True)
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(
        r"^```python\n([^`]*?out-with-logits.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    exec(block, {"TopWModel": TopWModel})
    *tokens, likelihood = capsys.readouterr().out.splitlines()
    assert len(tokens) == 4
    assert float(likelihood) < 0


def test_the_package_lists_the_modules_that_a_call_crosses(tmp_path: Path) -> None:
    model = TopWModel.from_pretrained(export(tmp_path / "out", Toy.random(1), form="grouped"))
    entered: set[str] = set()

    root = Path(topw_deploy.runtime.__file__).parent

    def watch(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)  # "<string>" of a dataclass
        if event == "call" and path.is_relative_to(root):
            entered.add(".".join(path.relative_to(root).with_suffix("").parts))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        model.generate("abc", max_new_tokens=8, seed=0)
    finally:
        sys.setprofile(before)
    listed = str(topw_deploy.runtime.__doc__).split("crosses these modules:\n")[1].split("\n\n")[0]
    assert entered == {name for line in listed.splitlines() for name in line.partition(":")[0].split(", ")}

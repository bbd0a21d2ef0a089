"""The examples of docs/guide/transformers.md run; it names every processor argument."""

import re
import sys
from pathlib import Path

import pytest
import transformers

from topw_deploy.sampling.parameters import ALIASES
from topw_deploy.sampling.processor import Choices, TopWLogitsProcessor

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "transformers.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_example_of_the_page_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(block, names)
    text = capsys.readouterr().out
    # Rounding on another processor may change a later draw.
    assert text.startswith("class Path(object):\n")
    assert isinstance(names["topw"], TopWLogitsProcessor)
    assert names["crop"].keep_mask.sum() == names["crop"].kept.sum() > 0


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "TopWLogitsProcessor" in text)
    names = {}
    exec(block, names)
    assert isinstance(names["topw"], TopWLogitsProcessor)
    assert names["tokens"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out.startswith("def parse(")


@pytest.mark.parametrize("name", [*Choices.__annotations__, *ALIASES, "preset"])
def test_the_page_names_every_choice(name):
    assert f"`{name}`" in PAGE or f"{name}=" in PAGE

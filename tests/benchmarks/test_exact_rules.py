"""`benchmarks.exact_rules` on a toy model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.exact_rules import SCALES, main
from tests.support.toy_model import Toy, export
from topw_lab.stats.exact import COMPARED


@pytest.mark.slow
def test_every_rule_has_a_row_in_each_table_and_texts_of_several_seeds_are_analysed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(tmp_path / "out", Toy.random(2))
    words = ["--temperatures", "1", "2", "--prompts", "2", "--seeds", "2", "--max-new-tokens", "3", "--steps", "4"]
    main(["--demo", str(folder), *words, "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert printed.count("2 prompts, 2 seeds; 4 4 steps") == len(SCALES)
    for name in COMPARED:
        assert len(re.findall(rf"^\|? ?{re.escape(name)} ", printed, re.MULTILINE)) == len(SCALES)
    found = json.loads((tmp_path / "found.json").read_text())["demo"]
    assert {unit: [each["label"] for each in summaries] for unit, summaries in found.items()} == {
        unit: ["1", "2"] for unit in SCALES
    }

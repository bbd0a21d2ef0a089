"""`topw compare`: prompts, report, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.invoking import Invoke
from topw_deploy import install
from topw_deploy.cli.lab import PROMPTS
from topw_deploy.errors import MissingPackageError, ParameterError, PromptError

SHORT = ("--max-new-tokens", 4, "--samples", 2, "--temperatures", "0.5,1", "--rules", "top_w,min_p")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "p.txt").write_bytes(b"abc\r\n\n  \nde\n")
    return tmp_path / "p.txt"


def test_the_table_goes_to_stdout_and_progress_to_stderr(folder: Path, prompts: Path, invoke: Invoke) -> None:
    result = invoke("compare", folder, "--prompts", prompts, *SHORT)
    assert result.exit_code == 0
    assert result.stderr == "Generating 16 texts: 2 rules at 2 temperatures\n"
    rows = [line.split()[1:4:2] for line in result.stdout.splitlines()[4:]]
    assert rows == [["0.5", "Top-W"], ["0.5", "min-p"], ["1", "Top-W"], ["1", "min-p"]]


def test_json_holds_every_number_and_text_and_the_page_is_written(
    folder: Path, prompts: Path, invoke: Invoke, tmp_path: Path
) -> None:
    words = ("compare", folder, "--prompts", prompts, *SHORT, "-q", "--seed", 3)
    report = json.loads(invoke(*words, "--json", "-").stdout)
    assert [rule["parameters"] for rule in report["rules"]] == [{"rule": "top_w"}, {"rule": "min_p", "min_p": 0.1}]
    assert (report["seed"], report["prompts"], len(report["cells"])) == (3, ["abc", "de"], 4)
    for cell in report["cells"]:
        perplexity = cell["values"]["perplexity"]
        assert perplexity["low"] <= perplexity["value"] <= perplexity["high"]
        assert [(one["prompt"], one["sample"]) for one in cell["samples"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert cell["tokens"] == sum(one["drawn"] for one in cell["samples"]) == 16
    shown = invoke(*words, "--json", tmp_path / "c.json", "--html", tmp_path / "c.html")
    assert "perplexity" in shown.stdout
    again = json.loads((tmp_path / "c.json").read_text("utf-8"))
    assert [cell["samples"] for cell in again["cells"]] == [cell["samples"] for cell in report["cells"]]
    assert (tmp_path / "c.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_questions_with_answers_give_accuracy_and_a_picture_and_a_second_run_continues_the_first(
    folder: Path, invoke: Invoke, tmp_path: Path
) -> None:
    asked, report = tmp_path / "q.jsonl", tmp_path / "r.json"
    asked.write_text('{"prompt": "abc", "answers": ["x", "y"]}\n{"prompt": "de"}\n')
    words = ("compare", folder, "--prompts", asked, *SHORT, "-q", "--json", report)
    shown = invoke(*words, "--plot", tmp_path / "p.png")
    assert "| accuracy |" in shown.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    first = json.loads(report.read_text())
    assert first["answers"] == [["x", "y"], []]
    assert [one["right"] is None for one in first["cells"][0]["samples"]] == [False, False, True, True]
    first["cells"][0]["seconds"] = 1234.5
    report.write_text(json.dumps(first))
    assert "1234.5" in invoke(*words, "--resume").stdout
    report.write_text("[")
    with pytest.raises(ParameterError, match=r"json_file is .*r.json, which is not a report of `topw compare`"):
        invoke(*words, "--resume")
    asked.write_text('{"prompt": "abc", "answers": "x"}\n')
    with pytest.raises(PromptError, match=r"line 1 of .*: answers is 'x', but must be a list of texts"):
        invoke(*words)


def test_wrong_options_are_refused_before_the_model_is_opened(prompts: Path, invoke: Invoke, tmp_path: Path) -> None:
    words = ("compare", tmp_path / "no model yet", "--prompts", prompts, "-q")
    for option, value, message in (
        ("--rules", "top_x", "rules has 'top_x'"),
        ("--temperatures", "hot", "temperatures is 'hot'"),
        ("--json", tmp_path / "none" / "x.json", "json_file is .*none is not a folder"),
        ("--html", tmp_path, "html_file is .*which is a folder"),
    ):
        with pytest.raises(ParameterError, match=message):
            invoke(*words, option, value)
    picture = ("--plot", tmp_path / "p.png")
    for option in (("--system", "x"), ("--resume",), ("--resume", "--json", "-"), picture, ("a prompt",)):
        assert invoke(*words, *option).exit_code == 2


@pytest.mark.parametrize("command", ["compare", "stats"])
def test_without_prompts_the_bundled_ones_are_continued(folder: Path, invoke: Invoke, command: str) -> None:
    words = (folder, "--limit", 2, "--max-new-tokens", 2, "--json", "-", "-q")
    report = json.loads(invoke(command, *words).stdout)
    bundled = PROMPTS.read_text("utf-8").splitlines()[:2]
    if command == "compare":
        assert report["prompts"] == bundled
    else:
        assert report["settings"][0]["prompts"] == 2


def test_prompts_may_be_arguments(folder: Path, invoke: Invoke) -> None:
    words = (folder, "one", "two", "--max-new-tokens", 2, "--json", "-", "-q", *SHORT)
    assert json.loads(invoke("compare", *words).stdout)["prompts"] == ["one", "two"]


def test_without_its_library_the_command_says_how_to_install_it(
    folder: Path, prompts: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: module != "sacrebleu")
    with pytest.raises(MissingPackageError, match="`topw compare` needs sacrebleu, which is not installed; run: "):
        invoke("compare", folder, "--prompts", prompts)

"""examples/paper_tables.py: a command for each cell of the paper's tables, which the commands' parsers accept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
import pytest

from examples import paper_tables
from tests.support.toy_model import Toy, export
from topw_deploy.cli.main import topw
from topw_deploy.runtime.rule_settings import USUAL, read_rules
from topw_deploy.sampling.parameters import PRESETS, preset_values
from topw_deploy.sampling.rules import RuleParameters
from topw_lab.judges import read_questions

CREATIVE = Path(paper_tables.__file__).with_name("creative.json")
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}>"
CELLS = len(paper_tables.PAPER) * len(paper_tables.TEMPERATURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("tables") / "out", Toy.random(7), chat_template=TEMPLATE)


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> list[list[str]]:
    paper_tables.main([str(word) for word in words])
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def parsed(words: list[str]) -> click.Context:
    """The context of a click command that `words` call. Raises UsageError for words that it does not take."""
    context = click.Context(topw, info_name="topw")
    command: click.Command = topw
    while isinstance(command, click.Group):
        name, words = words[1], words[1:]
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    return command.make_context(words[0], words[1:], parent=context)


def test_every_cell_has_its_own_command_and_output(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "out", "--seeds", 1, 2)
    assert len(found) == 2 * 5 * CELLS + 1
    outputs = [option(words, "--json" if "bench" in words else "--output_path" if "lm-eval" in words else "--output")
               for words in found]  # fmt: skip
    assert len(set(outputs)) == len(found)
    assert len({tuple(words) for words in found}) == len(found)


def test_a_choice_of_cells_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("out", "--only", "gpqa", "--rules", "eta", "top_w", "--temperatures", 0.7, "--seeds", 3, "--limit", 9)
    eta, top_w = printed(capsys, *words)
    assert option(eta, "--model_args") == "path=out,rule=eta,eta_cutoff=0.0002,temperature=0.7,seed=3"
    assert option(top_w, "--model_args") == "path=out,lam=2.2,beta=2.8,temperature=0.7,seed=3"
    assert (option(eta, "--tasks"), option(eta, "--num_fewshot")) == ("gpqa_main_generative_n_shot", "8")
    assert option(eta, "--limit") == "9"
    with pytest.raises(SystemExit):
        printed(capsys, "a,b")
    assert "a,b has a comma" in capsys.readouterr().err


def test_the_baselines_have_the_values_of_topw_compare() -> None:
    for name, rule in paper_tables.RULES.items():
        for parameter, value in rule.items():
            if parameter in USUAL and name not in ("top_k_10", "top_k_20"):
                assert float(value) == USUAL[parameter], name


def test_the_creative_setting_is_the_preset_s() -> None:
    preset = preset_values("creative")
    changed = {name: value for name, value in preset.items() if value != getattr(PRESETS["paper"][0], name)}
    assert changed == {"beta": paper_tables.CREATIVE["top_w"]["beta"]}
    assert float(paper_tables.CREATIVE["top_w"]["lam"]) == preset["lam"]


def test_the_creative_prompts_are_questions_with_their_source() -> None:
    found = read_questions(CREATIVE.read_bytes(), CREATIVE.name, "alpaca_eval")
    assert len({question.turns for question in found}) == 3
    assert all(question.dataset is not None and "2509.02510" in question.dataset for question in found)


@pytest.mark.parametrize("benchmark", [*paper_tables.JUDGED, "speed"])
def test_topw_takes_each_printed_command(folder: Path, capsys: pytest.CaptureFixture[str], benchmark: str) -> None:
    found = printed(capsys, folder, "--only", benchmark)
    assert len(found) == (1 if benchmark == "speed" else CELLS)
    for words in found:
        given = parsed(words).params
        if benchmark == "speed":
            rules = read_rules(given["rules"])
            assert [rule.parameters["rule"] for rule in rules] == [
                "top_w", "top_k", "top_k", "top_k", "top_p", "min_p", "eta", "top_h",
            ]  # fmt: skip
            continue
        assert (given["layout"], given["chat"], given["seed"]) == (paper_tables.JUDGED[benchmark], True, 1)
        rule = RuleParameters(**{name: given[name] for name in ("rule", "top_k", "top_p", "min_p", "eta_cutoff")
                                 if given[name] is not None})  # fmt: skip
        assert rule.chosen.name == (given["rule"] or "top_w")
        assert (given["lam"] == 2.2) == (rule.chosen.name == "top_w")


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [*paper_tables.TASKS])
def test_the_harness_takes_each_printed_command(capsys: pytest.CaptureFixture[str], benchmark: str) -> None:
    import lm_eval.tasks
    from lm_eval._cli import HarnessCLI

    from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
    from topw_lab.harness import Arguments

    found = printed(capsys, "out", "--only", benchmark)
    assert len(found) == CELLS
    for words in found:
        given = HarnessCLI()._parser.parse_args(["run", "--model", "topw_deploy", *words[2:]])
        others = Arguments(given.model_args).parameters
        assert others["temperature"] in paper_tables.TEMPERATURES
        assert {"lam", "beta"} <= others.keys() or others.keys() & set(RULE_PARAMETER_NAMES)
        assert given.num_fewshot == paper_tables.TASKS[benchmark].examples
    tasks = Path(given.include_path or Path(lm_eval.tasks.__file__).parent / benchmark).rglob("*.yaml")
    assert any(f"task: {paper_tables.TASKS[benchmark].name}\n" in task.read_text("utf-8") for task in tasks)


def test_the_table_has_the_mean_over_the_seeds_that_have_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell, names, scores in (
        ("top_w-t1-s1", ["results_2026-01-01.json", "results_2026-01-02.json"], [0.1, 0.5]),  # the later run counts
        ("top_w-t1-s2", ["results_2026-01-01.json"], [0.7]),
        ("min_p-t2-s2", ["results_2026-01-01.json"], [0.25]),
    ):
        for name, score in zip(names, scores, strict=True):
            path = tmp_path / "gsm8k" / cell / "a__model" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"results": {"gsm8k_cot": {"exact_match,flexible-extract": score}}}))
    words = shlex.split("out --only gsm8k --rules top_w min_p --temperatures 1 2 --seeds 1 2 3")
    paper_tables.main([*words, "--results", str(tmp_path), "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| gsm8k | T = 1 | T = 2 |",
        "|---|---|---|",
        "| top_w | 60.0 ± 14.1 |  |",
        "| min_p |  | 25.0 |",
    ]


@pytest.mark.slow
def test_run_writes_each_cell_once_and_stops_at_a_failure(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "c.json"
    prompts.write_text('["ab", "cde"]')
    words = [str(folder), "--only", "creative", "--creative", str(prompts), "--temperatures", "2", "--run"]
    words += ["--results", str(tmp_path / "results"), "--max-new-tokens", "4"]
    paper_tables.main([*words, "--rules", "top_w"])
    written = tmp_path / "results" / "creative" / "top_w-t2-s1.json"
    assert [answer["generator"] for answer in json.loads(written.read_text())] == ["top_w-t2-s1"] * 2
    before = written.stat().st_mtime_ns
    paper_tables.main([*words, "--rules", "top_w"])
    assert f"{written} exists" in capfd.readouterr().err
    assert written.stat().st_mtime_ns == before
    prompts.write_text("[]")
    with pytest.raises(SystemExit) as caught:
        paper_tables.main([*words, "--rules", "min_p", "top_p"])
    assert caught.value.code == 1
    said = capfd.readouterr().err
    assert "holds no question" in said
    assert "--top-p" not in said, "the next cell did not run"

"""`topw stats`: prompts, sweeps, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.invoking import Invoke
from tests.support.toy_model import Toy, export
from topw_deploy.cli.prompts import read_text_lines
from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling import preset_parameters
from topw_lab.stats.collect import settings_of

from .conftest import GEOMETRY

GIVEN = [f"--{name.replace('_', '-')}={value}" for name, value in GEOMETRY.items()]
SHORT = ("--max-new-tokens", 4)


def test_the_report_goes_to_stdout_and_progress_to_stderr(folder: Path, invoke: Invoke) -> None:
    result = invoke("stats", folder, "abc", "de", *SHORT, *GIVEN)
    assert result.exit_code == 0
    assert "2 prompts, 8 steps" in result.stdout
    assert "lam 0.6, beta 3, temperature 1" in result.stdout
    assert result.stderr.splitlines() == ["Generating from 2 prompts under 1 setting", "Analysing every step"]
    assert invoke("stats", folder, "abc", *SHORT, "-q").stderr == ""


@pytest.mark.slow
def test_prompts_come_from_arguments_lines_json_lines_or_standard_input(
    folder: Path, invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_bytes(b"abc\r\n\n  \nde\n")
    (tmp_path / "p.jsonl").write_text('"abc"\n{"prompt": "de", "id": 7}\n')
    wanted = invoke("stats", folder, "abc", "de", *SHORT, "-q").stdout
    assert invoke("stats", folder, "--file", tmp_path / "p.txt", *SHORT, "-q").stdout == wanted
    assert invoke("stats", folder, "--file", tmp_path / "p.jsonl", *SHORT, "-q").stdout == wanted
    assert invoke("stats", folder, "--file", "-", *SHORT, "-q", stdin="abc\nde").stdout == wanted
    one = invoke("stats", folder, "--file", "-", *SHORT, "-q", "--limit", 1, stdin="abc\nde").stdout
    assert "1 prompt, 4 steps" in one


def test_with_chat_a_prompt_is_the_user_s_message(invoke: Invoke, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    folder = export(tmp_path / "out", Toy.random(5), chat_template=template)
    wanted = invoke("stats", folder, "yabc!", *SHORT, "-q").stdout
    assert invoke("stats", folder, "abc", "--chat", "--system", "y", *SHORT, "-q").stdout == wanted
    assert invoke("stats", folder, "abc", "--system", "y").exit_code == 2
    with pytest.raises(PromptError, match="prompt 1: the prompt has 97 tokens"):
        invoke("stats", folder, "a" * 96, "--chat")


@pytest.mark.slow
def test_json_holds_every_number_and_replaces_the_table_on_stdout(folder: Path, invoke: Invoke, tmp_path: Path) -> None:
    printed = invoke("stats", folder, "abc", *SHORT, *GIVEN, "-q", "--json", "-").stdout
    invoke("stats", folder, "abc", *SHORT, *GIVEN, "-q", "--json", tmp_path / "s.json")
    report = json.loads(printed)
    assert json.loads((tmp_path / "s.json").read_text("utf-8")) == report
    (setting,) = report["settings"]
    assert (setting["whole"]["steps"], len(setting["ranges"]), report["seed"]) == (4, 4, 0)
    assert setting["parameters"]["lam"] == 0.6
    assert sum(place["certified"] for place in setting["ranges"]) == setting["whole"]["certified"]


def test_a_preset_sets_the_parameters_that_are_not_given(folder: Path, invoke: Invoke) -> None:
    words = ("stats", folder, "abc", *SHORT, "-q", "--json", "-", "--preset", "lively")
    report = json.loads(invoke(*words, "--beta", 3, "--sweep", "temperature=0.5,2").stdout)
    geometry = TopWModel.from_pretrained(folder, provider="cpu").manifest.sampler.geometry
    expected = preset_parameters("lively", *geometry) | {"beta": 3.0}
    assert [setting["parameters"] for setting in report["settings"]] == [
        pytest.approx(expected | {"temperature": temperature}) for temperature in (0.5, 2.0)
    ]
    assert report["preset"] == "lively"


def test_a_scale_per_median_distance_needs_one_in_the_folder(folder: Path, invoke: Invoke) -> None:
    with pytest.raises(ParameterError, match="no median distance of likely pairs"):
        invoke("stats", folder, "abc", *SHORT, "--geom-scale", 1, "--geom-unit", "median")


def test_two_sweeps_give_every_combination_of_their_values() -> None:
    found = settings_of({"lam": 1.0}, ["temperature=1,2", "warm-p=0.5"])
    assert found == [
        RuleSetting("temperature 1, init_top_p 0.5", {"lam": 1.0, "temperature": 1.0, "init_top_p": 0.5}),
        RuleSetting("temperature 2, init_top_p 0.5", {"lam": 1.0, "temperature": 2.0, "init_top_p": 0.5}),
    ]
    assert settings_of({"lam": 1.0}, []) == [RuleSetting("", {"lam": 1.0})]
    presets = settings_of({}, ["preset=paper,lively", "lam=1"])
    assert [each.label for each in presets] == ["paper, lam 1", "lively, lam 1"]
    assert settings_of({}, ["beta=2.8, 1.5+1.5*T"]) == [
        RuleSetting("beta 2.8", {"beta": 2.8}),
        RuleSetting("beta 1.5+1.5*T", {"beta": "1.5+1.5*T"}),
    ]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("temperature", "is not NAME=V1,V2"),
        ("temperature=", "temperature is '', but must be"),
        ("temperature=1,x", "temperature is 'x', but must be"),
        ("temprature=1", "did you mean temperature"),
        ("lam=1", "lam is given twice"),
        ("beta=1.5+T", "beta is '1.5[+]T'"),
        ("temperature=1+1*T", "temperature is '1[+]1[*]T', but must be"),
    ],
)
def test_a_wrong_sweep_is_refused(sweep: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        settings_of({"lam": 1.0}, [sweep])
    with pytest.raises(ParameterError, match="beta is given twice"):
        settings_of({}, ["beta=1", "beta=2"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "a", "seed": 3}', "has seed, but all texts have the same parameters"),
        (json.dumps("x" * 100), ": the prompt has 100 tokens, the model's context holds 96"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_line(
    folder: Path, invoke: Invoke, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(PromptError, match=rf"line 2 of .*a\.jsonl ?{message}"):
        invoke("stats", folder, "--file", tmp_path / "a.jsonl")


def test_only_line_feeds_end_a_prompt() -> None:
    found = read_text_lines("\ufeffa\u2028b\x0cc\r\nd".encode(), "f")
    assert [line.prompt for line in found] == ["a\u2028b\x0cc", "d"]


def test_a_seed_beyond_the_largest_is_refused_before_anything_is_generated(
    folder: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TopWModel, "generate", lambda *_arguments, **_parameters: pytest.fail("a text was generated"))
    with pytest.raises(ParameterError, match="seed is 18446744073709551616, but must be an integer"):
        invoke("stats", folder, "abc", *SHORT, "--seed", 2**64 - 1, "--seeds", 2)

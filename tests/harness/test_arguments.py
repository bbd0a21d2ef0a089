"""`--model_args`: every name is known or refused; `topw lm-eval` passes its arguments to the harness."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from topw_deploy.errors import ParameterError

from .conftest import Open

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batchsize": 3}, "unknown parameter 'batchsize': did you mean batch_size?"),
        ({"temprature": 1.0}, "unknown parameter 'temprature': did you mean temperature?"),
        ({"frobnicate": 1}, "unknown parameter 'frobnicate'"),
        ({"pretrained": "x"}, "pretrained is not an argument of this model: give path"),
        ({"max_tokens": 4}, "max_tokens is not an argument of this model: give max_gen_toks"),
        ({"n": 2}, "n is not an argument of this model: it changes what a request returns"),
        ({"prompt_logprobs": 2}, "prompt_logprobs is not an argument of this model: it changes what"),
        ({"path": None}, "path is missing; give --model_args path=OUT"),
        ({"path": b"out"}, "path is missing; give --model_args path=OUT"),
        ({"device": "cuda:1"}, "device is 'cuda:1', but must be cpu; give --model_args provider=cuda"),
        ({"batch_size": "many"}, "batch_size is 'many', but must be an integer >= 1"),
        ({"max_batch_size": 0}, "max_batch_size is 0, but must be an integer >= 1"),
        ({"max_gen_toks": True}, "max_gen_toks is True, but must be an integer >= 1"),
        ({"seed": -1}, "seed is -1, but must be an integer in"),
        ({"lam": -2.0}, "lam is -2.0"),
        ({"top_m": 3}, "top_m is built into the graph"),
        ({"chat_template_args": "[" * 1_000_000}, "must be a JSON object"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"chat_template_args": "[1]"}, "chat_template_args is '\\[1\\]', but must be a JSON object"),
        ({"think_end_token": ""}, "think_end_token is '', but must be a non-empty text"),
    ],
)
def test_unknown_and_invalid_arguments_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    from topw_lab.harness import Arguments

    with pytest.raises(ParameterError, match=said):
        Arguments({"path": "out", **given})


@pytest.mark.parametrize(
    ("size", "most", "rows"), [(None, None, 8), ("auto", None, 8), ("auto:4", 3, 3), ("16", None, 16), (5, 64, 5)]
)
def test_the_batch_size_is_the_engine_s_rows(size: Any, most: Any, rows: int) -> None:
    from topw_lab.harness import Arguments

    assert Arguments({"path": "out", "batch_size": size, "max_batch_size": most}).rows == rows


def test_options_reach_the_model_the_engine_and_every_request() -> None:
    from topw_lab.harness import Arguments

    found = Arguments({
        "path": "out", "device": "cpu", "sampler": "graph", "max_length": 64, "prefix_bytes": 9, "exact": True,
        "lambda_geom": 1, "preset": "lively", "temperature": 1.5, "stop": "x",
    })  # fmt: skip
    assert found.opening == {"provider": "cpu", "sampler": "graph", "max_length": 64}
    assert found.engine == {"prefix_bytes": 9, "exact": True}
    assert found.parameters == {"lam": 1.0, "preset": "lively", "temperature": 1.5, "stop_strings": ("x",)}
    assert "provider" not in Arguments({"path": "out", "device": "cuda:0"}).opening, "the harness's default"


def test_the_context_may_be_shorter(opened: Open) -> None:
    model = opened(max_length=40, batch_size=2)
    assert model.max_length == 40
    assert model._runner.engine.stats().slots == 2
    with pytest.raises(ParameterError, match="max_length is 4000, but the model's context holds"):
        opened(max_length=4000)


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["--tasks", "t"], ["run", "--model", "topw_deploy", "--tasks", "t"]),
        (["run", "-t", "t"], ["run", "--model", "topw_deploy", "-t", "t"]),
        (["--model", "hf", "--tasks", "t"], ["run", "--model", "hf", "--tasks", "t"]),
        (["run", "--model=hf"], ["run", "--model=hf"]),
        (["-C", "c.yaml"], ["run", "-C", "c.yaml"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        (["run", "--help"], ["run", "--model", "topw_deploy", "--help"]),
    ],
)
def test_the_command_names_the_model(monkeypatch: pytest.MonkeyPatch, words: list[str], passed: list[str]) -> None:
    import lm_eval.__main__

    from topw_deploy.cli import main

    seen: list[list[str]] = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: seen.append(sys.argv[:]))
    before = sys.argv[:]
    assert main.run(main.topw, "topw", "TOPW", ["lm-eval", *words]) == 0
    assert seen == [["lm_eval", *passed]]
    assert sys.argv == before


def entry_point() -> EntryPoint:
    """The model's, as pyproject.toml declares it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    ((name, value),) = groups["lm_eval.models"].items()
    return EntryPoint(name, value, "lm_eval.models")


def test_the_entry_point_is_the_class_under_the_registered_name() -> None:
    from topw_lab.harness import NAME, TopWHarness

    assert entry_point().name == NAME
    assert entry_point().load() is TopWHarness


@pytest.mark.long
def test_a_wrong_argument_is_one_sentence(scoring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from topw_deploy.cli import main

    tasks = ROOT / "examples" / "lm_eval"
    words = ["--model_args", f"path={scoring},tempreature=1", "--tasks", "topw_demo_text", "--include_path", str(tasks)]
    assert main.run(main.topw, "topw", "TOPW", ["lm-eval", *words]) == 1
    assert "Error: unknown parameter 'tempreature': did you mean temperature?" in capsys.readouterr().err

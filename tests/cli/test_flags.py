"""Errors name the option, a wrong value exits with 2, and a misspelt word gets a suggestion."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.samples import slow
from tests.support.toy_model import Toy, export

from .conftest import Program


def error(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines()[-1].removeprefix("Error: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", 10**30], f"--seed is {10**30}, but must be an integer in [0, 18446744073709551616)."),
        (["--temperature", "nan"], "--temperature is nan, but must be a finite number >= 0."),
        (["--stop", ""], "--stop is [''], but must be a non-empty string or a list of them."),
        (["--warm_p", 2], "--warm-p is 2.0, but must be in (0, 1]."),
        (["--logit-bias", "999=1"], "--logit-bias names the token id 999, but ids go from 0 to 258."),
        (["--max-context", 100], "--max-context is 100, but the model's context holds 96; give at most that."),
        (["--threads", 5000], "--threads is 5000, but must be an integer in [0, 1024] (0: onnxruntime's choice)."),
    ],
)
def test_a_wrong_value_names_its_option_and_exits_with_2(
    program: Program, random_model: Path, words: list[object], message: str
) -> None:
    done = program("generate", random_model, "x", *words)
    assert (done.returncode, done.stdout, error(done)) == (2, "", message)
    assert done.stderr.startswith("Usage: topw generate [OPTIONS] MODEL [PROMPT]\n")


def test_a_wrong_value_of_a_variable_names_the_variable(program: Program, random_model: Path) -> None:
    done = program("generate", random_model, "x", TOPW_GENERATE_LAM="-1")
    assert (done.returncode, error(done)) == (2, "TOPW_GENERATE_LAM is -1.0, but must be a finite number >= 0.")


def test_a_wrong_value_of_the_models_own_exits_with_1(program: Program, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(0), generation_config={"temperature": -1})
    message = "generation_config.json: temperature is -1, but must be a finite number >= 0."
    for words in ((), ("--temperature", "0.5")):
        done = program("generate", folder, "x", *words)
        assert (done.returncode, error(done)) == (1, message)


def test_an_error_other_than_a_wrong_value_names_the_option_and_exits_with_1(
    program: Program, random_model: Path
) -> None:
    done = program("generate", random_model, "abcdef", "--max-context", 5)
    assert done.returncode == 1
    assert "has 6 tokens, but the model was opened with --max-context 5;" in error(done)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top_m", 0], "--top-m is 0, but must be an integer >= 1."),
        (
            ["--max-length", 64],
            "--max-length is the length of tensorrt's static cache; leave it out for other targets and caches.",
        ),
        (
            ["--max-shard-size", "5xB"],
            "--max-shard-size is '5xB', but must be a positive number of bytes below 2^63, such as ",
        ),
        (["--int4-block-size", 32], "--int4-block-size is an option for quantised weights, but dtype is fp32; "),
    ],
)
def test_a_wrong_value_of_an_export_names_its_option(
    program: Program, tmp_path: Path, words: list[object], message: str
) -> None:
    for is_own, start in ((False, ["export"]), (True, [])):
        done = program(*start, "tiny", tmp_path / "out", *words, export=is_own)
        assert (done.returncode, error(done)[: len(message)]) == (2, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stats", "OUT", "x", "--sweep", "temperatur=1"], "unknown parameter 'temperatur': did you mean temperature?"),
        (["stats", "OUT", "x", "--json", "/nowhere/x"], "--json is /nowhere/x, but /nowhere is not a folder;"),
        (["bench", "decode", "OUT", "--threads", "0"], "Invalid value for '--threads': 0 is not in the range"),
        (["bench", "decode", "OUT", "--new-tokens", "500"], "128 + 500 tokens exceed the context of 96; lower "
         "--prompt-tokens or --new-tokens."),
        (["bench", "sampler", "--peers", "nemo"], "'nemo' is not a side of this benchmark; choose from "),
        (["export-sampler", "--metric", "uniform", "--vocab-size", "9", "--opset", "3", "/nowhere"],
         "--opset is 3, but the sampler needs 18 to 24;"),
        (["build-engine", "OUT", "--timing-cache", "/nowhere/x"], "--timing-cache is /nowhere/x, but /nowhere is not"),
        (["generate", "OUT", "x", "--provider", "cudda"], "--provider is 'cudda', which is not an execution provider: "
         "did you mean 'cuda'?"),
        (["generate", "OUT", "x", "--device", "gpu"], "--device is 'gpu', which is not an execution provider: did you "
         "mean 'cuda'?"),
        (["generate", "-m", "OUT", "x", "--echo", "--json"], "--echo is for text, but --json and --prompts-jsonl"),
        (["chat", "-m", "OUT", "hello"], "Got unexpected extra argument (hello)."),
        (["compare", "OUT", "--rules", "minp"], "--rules has 'minp': did you mean min_p? known are top_w, "),
        (["serve", "-m", "OUT", "--api-key", ""], "--api-key is '', but must be printable text"),
        (["lm-eval", "--tasks", "no_such_task"], "Tasks not found: no_such_task; see `topw lm-eval ls tasks`"),
    ],
)  # fmt: skip
def test_wrong_values_of_the_other_commands_name_their_options(
    program: Program, random_model: Path, words: list[str], message: str
) -> None:
    done = program(*(str(random_model) if word == "OUT" else word for word in words))
    assert (done.returncode, error(done)[: len(message)]) == (2, message)


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (["exprot", "tiny", "out"], "export"),
        slow(["bench", "samper"], "sampler"),
        slow(["plugins", "buidl"], "build"),
        (["generate", "out", "x", "--temprature", "1"], "--temperature"),
        (["generate", "out", "x", "--ctx-size", "9"], "--max-context"),
        (["generate", "out", "x", "--n-gpu-layers", "9"], "--device"),
        (["generate", "out", "x", "--topk", "9"], "--top-k"),
        (["serve", "out", "--timeout", "9"], "--request-timeout"),
        (["export", "tiny", "out", "--weight-format", "int4"], "--dtype"),
        (["convert", "tiny", "out"], "export"),
        slow(["generate", "out", "x", "--sampler", "natve"], "native"),
        slow(["export", "tiny", "out", "--preset", "papr"], "paper"),
        slow(["export", "tiny", "out", "--dtype", "Q4_K_M"], "int4"),
        slow(["bench", "sampler", "--regime", "certifed"], "certified"),
    ],
)
def test_a_similar_word_is_suggested(program: Program, words: list[str], suggested: str) -> None:
    done = program(*words)
    assert done.returncode == 2
    assert "Did you mean" in error(done)
    assert f"'{suggested}'" in error(done).split("Did you mean")[1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["export", "tiny", "out", "--device", "cuda"], ""), (["generate", "out", "x", "--color"], ""),
     (["stats", "out", "x", "--n", "3"], ""), (["inspect", "--model", "out"], " Give MODEL without --model.")],
)  # fmt: skip
def test_a_distant_word_is_not_suggested(program: Program, words: list[str], hint: str) -> None:
    flag = next(word for word in words if word.startswith("--"))
    assert error(program(*words)) == f"No such option '{flag}'.{hint}"


def test_topw_export_prints_its_version(program: Program) -> None:
    shown = program("--version").stdout
    done = program("--version", export=True)
    assert (done.returncode, done.stdout) == (0, shown.replace("topw ", "topw-export "))
    assert program("export", "--version").returncode == program(export=True).returncode == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_one_sentence(program: Program, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    done = program("generate", tmp_path / "locked" / "out", "x")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Permission denied" in done.stderr

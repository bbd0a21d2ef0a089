"""Options of `topw generate` for structured output and log-probabilities."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.invoking import Invoke
from tests.support.toy_model import Toy, export

from .conftest import Program

pytest.importorskip("llguidance")


@pytest.mark.parametrize("given", [("--regex", "[ab]{3}"), ("--choice", "bab", "--choice", "aab")])
def test_an_answer_matches_its_expression_or_is_one_of_the_choices(
    invoke: Invoke, random_model: Path, given: tuple[str, ...]
) -> None:
    result = invoke("generate", random_model, "x", "--seed", 1, *given)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.fullmatch("[ab]{3}\n", result.stdout)


def test_schemas_and_grammars_may_be_in_files(invoke: Invoke, random_model: Path, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [17, "é"]}', encoding="utf-8")
    grammar.write_text('start: "left" | "right"')
    for option in (f"@{schema}", schema.read_text(encoding="utf-8")):
        result = invoke("generate", random_model, "x", "--seed", 1, "--json-schema", option)
        assert json.loads(result.stdout) in (17, "é")
    assert invoke("generate", random_model, "x", "--grammar", f"@{grammar}").stdout in ("left\n", "right\n")


def test_two_constraints_on_an_answer_are_refused(invoke: Invoke, random_model: Path) -> None:
    result = invoke("generate", random_model, "x", "--regex", "a", "--choice", "b")
    assert result.exit_code == 2
    assert "only one of --regex, --choice" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--json-schema", "5"), "--json-schema is 5, but must be a JSON object or true."),
     (("--json-schema", "x"), "--json-schema is not JSON: "),
     (("--regex", "("), "--regex: the expression does not compile: "),
     (("--choice", ""), "--choice must be a list of non-empty texts.")],
)  # fmt: skip
def test_a_wrong_constraint_names_its_option(
    program: Program, random_model: Path, words: tuple[str, str], message: str
) -> None:
    done = program("generate", random_model, "x", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"Error: {message}")


def test_a_missing_file_is_named(invoke: Invoke, random_model: Path, tmp_path: Path) -> None:
    result = invoke("generate", random_model, "x", "--json-schema", f"@{tmp_path / 'none.json'}")
    assert result.exit_code == 2
    assert "--json-schema" in result.stderr
    assert "none.json cannot be read" in result.stderr


def test_logprobs_are_in_the_json_lines(invoke: Invoke, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", Toy.random(7), with_logits=True)
    words = ("generate", folder, "x", "--seed", 1, "--max-new-tokens", 3, "--logprobs", 2)
    line = json.loads(invoke(*words, "--json").stdout)
    assert [len(token["top_logprobs"]) for token in line["token_logprobs"]] == [2, 2, 2]
    assert [token["token_id"] for token in line["token_logprobs"]] == line["token_ids"]
    plain = invoke(*words)
    assert plain.exit_code == 2
    assert "--logprobs needs --json" in plain.stderr

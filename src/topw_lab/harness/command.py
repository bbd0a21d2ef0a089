"""Runs the command line of lm-evaluation-harness with this package's model registered."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from topw_lab.harness import NAME

_COMMANDS = ("run", "ls", "validate")
_NAMING_A_MODEL = ("--model", "-M", "--config", "-C")  # a configuration may name the model


def run(words: Sequence[str]) -> None:
    """Run `lm_eval WORDS`. The model is `topw_deploy` unless the words name another one.

    Raises the model's errors, and SystemExit for wrong usage.
    """
    from lm_eval.__main__ import cli_evaluate

    arguments = list(words) if words and words[0] in _COMMANDS else ["run", *words]
    if (
        arguments[0] == "run"
        and len(arguments) > 1
        and not any(word.split("=")[0] in _NAMING_A_MODEL for word in arguments)
    ):
        arguments[1:1] = ["--model", NAME]
    given = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = given

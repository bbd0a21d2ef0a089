"""A model class for lm-evaluation-harness, registered as `topw_deploy` (docs/guide/evaluation.md).

`model` has the class, the parameters and seed of a request, log-likelihoods of continuations, and `--model_args`.
Importing this package registers the class, so that `lm_eval.simple_evaluate(model="topw_deploy", ...)` finds it. `run`
is the harness's own command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from topw_deploy import install

install.require("evaluating", "lm-eval")

import lm_eval.models  # noqa: E402, F401  # the harness registers its own models only into an empty registry
from lm_eval.api.registry import model_registry  # noqa: E402

NAME = "topw_deploy"

if NAME not in model_registry:
    model_registry.register(NAME, target="topw_lab.harness.model:TopWHarness")

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

"""The options of `topw generate` for structured output and log-probabilities."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from topw_deploy.plain_text import decode_text

Command = TypeVar("Command", bound=Callable[..., Any])

_CONSTRAINT_KEYS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Option -> its key in `structured_outputs`."""


def answer_options(command: Command) -> Command:
    """Add the options whose values `take_answer_options` takes. Their default is None or empty."""
    options = (
        click.option(
            "--json-schema", "-j", metavar="SCHEMA", help="Answer in JSON that matches this schema, or @FILE."
        ),
        click.option(
            "--regex", metavar="EXPR", help="Answer with a text that fully matches this expression, or @FILE."
        ),
        click.option("--choice", metavar="TEXT", multiple=True, help="Answer with one of these texts. Repeatable."),
        click.option("--grammar", metavar="TEXT", help="Answer with a text of this Lark or GBNF grammar, or @FILE."),
        click.option(
            "--logprobs",
            type=click.IntRange(min=0),
            help="With --json: also print the log-probability of each token, and of this many alternatives.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_answer_options(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `answer_options`. Returns the parameters of `TopWModel.generate` that they set.

    Raises UsageError if more than one option says what the text must match, or if a file cannot be read.
    """
    constraints = {name: value for name in _CONSTRAINT_KEYS if (value := values.pop(name)) not in (None, ())}
    logprobs = values.pop("logprobs")
    parameters = {} if logprobs is None else {"logprobs": logprobs}
    if len(constraints) > 1:
        raise click.UsageError(f"give only one of {', '.join(map(_flag, constraints))}.")
    for name, value in constraints.items():
        constraint = list(value) if name == "choice" else _text_or_file(_flag(name), value)
        parameters["structured_outputs"] = {_CONSTRAINT_KEYS[name]: constraint}
    return parameters


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text_or_file(flag: str, value: str) -> str:
    """`value`, or the text of the file FILE for a value of the form @FILE."""
    if not value.startswith("@"):
        return value
    path = value[1:]
    try:
        with open(path, "rb") as file:
            return decode_text(file.read(), path)
    except OSError as error:
        raise click.UsageError(f"{flag}: {os.fsdecode(path)} cannot be read: {error.strerror or error}.") from None

"""Rewrite error messages to name command-line options instead of Python parameters."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, cast

import click
from click.core import ParameterSource

from topw_deploy.cli.terminal import tell
from topw_deploy.errors import TopWError

# Parameter -> its option, if the option has another name.
_OPTION_OF = {
    "intra_op_num_threads": "threads",
    "max_length": "max_context",
    "algorithm": "quantisation_algorithm",
    "exclude": "exclude_nodes",
    "form": "tail",
    "model_dir": "transformers",
    "regimes": "regime",
    "temperatures": "temperature",
    "output": "out",
}
_GIVEN = {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}


class RunningContext(click.Context):
    """A context that attaches itself to errors, as click does not record the command."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, TopWError) and context_of(error) is None:
            error.__dict__["context"] = self
        return super().__exit__(kind, error, trace)

    def invoke(self, *args: Any, **values: Any) -> Any:  # type: ignore[override]
        for note in misspelt_variables(self):
            tell(f"Note: {note}")
        return super().invoke(*args, **values)


def context_of(error: TopWError) -> click.Context | None:
    """The click context in which `error` was raised."""
    return cast("click.Context | None", error.__dict__.get("context"))


def follow(command: click.Command) -> click.Command:
    """Make `command` and its sub-commands attach their contexts to errors."""
    command.context_class = RunningContext
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        follow(inner)
    return command


def in_flags(error: TopWError, words: Sequence[str]) -> str:
    """`error`'s message with options instead of Python parameters. words: the command line's arguments."""
    message, context = str(error), context_of(error)
    if context is None:
        return message
    for name in sorted(error.parameters, key=len, reverse=True):  # max_length before max
        option = _option(context, name)
        if option is not None:
            message = _named(message, name, _spelling(option, context, words), option.opts)
    return message


def was_given(error: TopWError) -> bool:
    """Whether the user set a parameter named by `error`."""
    context = context_of(error)
    if context is None:
        return False
    options = (_option(context, name) for name in error.parameters)
    return any(o is not None and context.get_parameter_source(str(o.name)) in _GIVEN for o in options)


def misspelt_variables(context: click.Context) -> Iterator[str]:
    """A note for each environment variable that looks like a misspelling of an option's."""
    prefix = f"{context.auto_envvar_prefix}_"
    options = [option for option in context.command.params if isinstance(option, click.Option)]
    known = {_variable(option, context): option for option in options}
    by_flag = {prefix + flag.strip("-").replace("-", "_").upper(): name for name, option in known.items()
               for flag in option.opts}  # fmt: skip
    for given in sorted(os.environ):
        # TOPW_EXPORT_SAMPLER_* belong to `topw export-sampler`.
        if not given.startswith(prefix) or given in known or given.startswith(f"{prefix}SAMPLER_"):
            continue
        near = difflib.get_close_matches(given, [*known, *by_flag], n=1, cutoff=0.9)
        if near:
            yield f"the environment variable {given} is not read; did you mean {by_flag.get(near[0], near[0])}?"


def suggestion(typed: str, known: Iterable[str]) -> str:
    """` Did you mean 'export'?`, or "" if no known word is similar."""
    near = difflib.get_close_matches(typed, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _option(context: click.Context, name: str) -> click.Parameter | None:
    options = {option.name: option for option in context.command.params}
    return options.get(name) or options.get(f"no_{name}") or options.get(_OPTION_OF.get(name, name))


def _spelling(option: click.Parameter, context: click.Context, words: Sequence[str]) -> str:
    """The option as the user typed it, else its environment variable or longest name; for an argument, its name."""
    if isinstance(option, click.Argument):
        return option.human_readable_name.strip("[].")
    if context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT:
        return _variable(option, context)
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    flags = [*option.opts, *option.secondary_opts]
    return next((flag for flag in flags if flag in typed), max(option.opts[:2], key=len))


def _variable(option: click.Parameter, context: click.Context) -> str:
    named = option.envvar if isinstance(option.envvar, str) and option.envvar in os.environ else None
    return named or f"{context.auto_envvar_prefix}_{str(option.name).upper()}"


def _named(message: str, name: str, flag: str, flags: Sequence[str]) -> str:
    """Replace `name` by `flag` in a message, also in name=True and name='value'.

    A name without an underscore may be an ordinary word: replace it only once, and not if the message already has one
    of `flags`.
    """
    word = rf"(?<![\w'\"./-]){re.escape(name)}(?![\w'\"/-])"
    message = re.sub(rf"{word}=True\b", lambda _: flag, message)
    message = re.sub(rf"{word}='([^']*)'", lambda found: f"{flag} {found[1]}", message)
    if "_" in name:
        return re.sub(word, lambda _: flag, message)
    named = any(known in message for known in flags if known.startswith("--"))
    return message if named else re.sub(word, lambda _: flag, message, count=1)

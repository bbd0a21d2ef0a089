"""Name command-line options instead of Python parameters in error messages."""

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

# Python parameter -> name of its option, where the two differ.
_OPTION_OF_PARAMETER = {
    "intra_op_num_threads": "threads",
    "max_length": "max_context",
    "exclude": "exclude_nodes",
    "model_dir": "transformers",
    "regimes": "regime",
    "temperatures": "temperature",
    "output": "out",
}
_SET_BY_USER = {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT}


class RunningContext(click.Context):
    """A context that attaches itself to errors, because click does not record the command in them."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, TopWError) and context_of(error) is None:
            error.__dict__["context"] = self
        return super().__exit__(kind, error, trace)

    def invoke(self, *args: Any, **values: Any) -> Any:  # type: ignore[override]
        for note in notes_on_variables(self):
            tell(f"Note: {note}")
        return super().invoke(*args, **values)


def context_of(error: TopWError) -> click.Context | None:
    """The context of the command that raised `error`; None outside of commands."""
    return cast("click.Context | None", error.__dict__.get("context"))


def attach_contexts(command: click.Command) -> click.Command:
    """Make `command` and its sub-commands attach their contexts to errors. Returns `command`."""
    command.context_class = RunningContext
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        attach_contexts(inner)
    return command


def with_flags(error: TopWError, words: Sequence[str]) -> str:
    """The message of `error`, with options instead of Python parameters.

    words: the arguments of the command line, for the spelling of the options.
    """
    message, context = str(error), context_of(error)
    if context is None:
        return message
    for name in sorted(error.parameters, key=len, reverse=True):  # max_length before a name such as max
        option = _option_of(context, name)
        if option is not None:
            message = _replace_name(message, name, _option_text(option, context, words), option.opts)
    return message


def is_set_by_user(error: TopWError) -> bool:
    """Whether the user set one of the parameters that `error` names."""
    context = context_of(error)
    if context is None:
        return False
    options = (_option_of(context, name) for name in error.parameters)
    return any(
        option is not None and context.get_parameter_source(str(option.name)) in _SET_BY_USER for option in options
    )


def notes_on_variables(context: click.Context) -> Iterator[str]:
    """Yield a note for each environment variable that looks like a misspelt variable of an option."""
    prefix = f"{context.auto_envvar_prefix}_"
    options = [option for option in context.command.params if isinstance(option, click.Option)]
    known = {_variable_of(option, context): option for option in options}
    by_flag = {prefix + flag.strip("-").replace("-", "_").upper(): name for name, option in known.items()
               for flag in option.opts}  # fmt: skip
    for variable in sorted(os.environ):
        # TOPW_EXPORT_SAMPLER_* belong to `topw export-sampler`.
        if not variable.startswith(prefix) or variable in known or variable.startswith(f"{prefix}SAMPLER_"):
            continue
        near = difflib.get_close_matches(variable, [*known, *by_flag], n=1, cutoff=0.9)
        if near:
            yield f"the environment variable {variable} is not read; did you mean {by_flag.get(near[0], near[0])}?"


def suggestion(typed: str, known: Iterable[str]) -> str:
    """The end of a sentence, such as " Did you mean 'export'?"; "" if no known word is similar to `typed`."""
    near = difflib.get_close_matches(typed, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _option_of(context: click.Context, name: str) -> click.Parameter | None:
    """The option or argument of the Python parameter `name`; None if the command has none."""
    options = {option.name: option for option in context.command.params}
    return options.get(name) or options.get(f"no_{name}") or options.get(_OPTION_OF_PARAMETER.get(name, name))


def _option_text(option: click.Parameter, context: click.Context, words: Sequence[str]) -> str:
    """The option as the user typed it, or else its environment variable or longest name; the name of an argument."""
    if isinstance(option, click.Argument):
        return option.human_readable_name.strip("[].")
    if context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT:
        return _variable_of(option, context)
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    flags = [*option.opts, *option.secondary_opts]
    return next((flag for flag in flags if flag in typed), max(option.opts[:2], key=len))


def _variable_of(option: click.Parameter, context: click.Context) -> str:
    """The environment variable that sets the option."""
    own = option.envvar if isinstance(option.envvar, str) and option.envvar in os.environ else None
    return own or f"{context.auto_envvar_prefix}_{str(option.name).upper()}"


def _replace_name(message: str, name: str, flag: str, flags: Sequence[str]) -> str:
    """Replace `name` by `flag` in a message, also in name=True and name='value'.

    A name without an underscore may be an ordinary word. Only its first occurrence is replaced, and none if the message
    already has one of `flags`.
    """
    word = rf"(?<![\w'\"./-]){re.escape(name)}(?![\w'\"/-])"
    message = re.sub(rf"{word}=True\b", lambda _: flag, message)
    message = re.sub(rf"{word}='([^']*)'", lambda found: f"{flag} {found[1]}", message)
    if "_" in name:
        return re.sub(word, lambda _: flag, message)
    has_flag = any(known in message for known in flags if known.startswith("--"))
    return message if has_flag else re.sub(word, lambda _: flag, message, count=1)

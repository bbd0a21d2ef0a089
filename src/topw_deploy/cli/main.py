"""`topw` and `topw-export`: run a command and report errors.

Exit codes: 0 success; 1 failure, with one sentence on stderr (none for a closed pipe); 2 wrong usage or option value;
130 interrupted. Commands are imported when called, for a fast `topw --help`.
"""

from __future__ import annotations

import copy
import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TextIO

import click

from topw_deploy import install
from topw_deploy.cli.flags import attach_contexts, context_of, is_set_by_user, suggestion, with_flags
from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import prepare_streams, tell
from topw_deploy.errors import ParameterError, TopWError

COMMANDS = {
    "export": "Export a model with its sampler into one ONNX graph.",
    "export-sampler": "Export the sampler alone, for logits from elsewhere.",
    "check": "Ask TensorRT's parser which nodes of an exported model it takes.",
    "build-engine": "Build a TensorRT engine of an exported model, for this machine.",
    "generate": "Generate text with an exported model.",
    "serve": "Serve exported models over HTTP, with the endpoints of OpenAI's API.",
    "triton": "Add an exported model to a model repository of NVIDIA's Triton Inference Server.",
    "web": "Write a static site that runs an exported model in the browser.",
    "stats": "Show what Top-W did to a text: crop sizes, and whether geometry acted.",
    "compare": "Compare texts of several sampling rules and temperatures.",
    "lm-eval": "Evaluate an exported model on tasks of lm-evaluation-harness.",
    "inspect": "Show the contents of an exported folder.",
    "verify": "Check an exported folder again.",
    "bench": "Time sampling and decoding, compared with other libraries.",
    "plugins": "Build the native libraries for GPUs, and show the installed ones.",
    "doctor": "Show versions, providers and missing parts.",
}
"""Command -> its line in `topw --help`; its module is `topw_deploy.cli.<name>`."""

_EXTRAS = {
    "export": "needs [export]",
    "export-sampler": "needs [export]",
    "serve": "needs [serve]",
    "stats": "needs [export]",
    "compare": "needs [compare]",
    "lm-eval": "needs [lm-eval]",
    "verify": "more with [export]",
    "bench": "more with [export]",
}
"""Command -> its remark in `topw --help` on the extra that it needs or can use."""

_EXTRAS_NOTE = "[export] is the extra with torch and onnx; if it is missing, `topw doctor` shows how to install it."
# Extra -> subject of the sentence that says that the extra is missing.
_ACTIVITIES = {
    "cpu": "running a model",
    "export": "exporting",
    "compare": "comparing rules",
    "lm-eval": "evaluating",
    "serve": "serving",
}

_INTERRUPTED = 130
_VERSION: dict[str, Any] = {"package_name": "topw-deploy", "message": "%(prog)s %(version)s"}
# Errors of writing to stdout: a full disk or a closed descriptor, for example.
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _LazyGroup(click.Group):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _with_extra(name, text)) for name, text in COMMANDS.items()])
        formatter.write_paragraph()
        formatter.write_text(_EXTRAS_NOTE)


def _with_extra(name: str, text: str) -> str:
    return f"{text} ({_EXTRAS[name]})" if name in _EXTRAS else text


def _load_command(name: str) -> click.Command:
    command: click.Command = importlib.import_module(f"topw_deploy.cli.{name.replace('-', '_')}").command
    return attach_contexts(command)


@click.group(cls=_LazyGroup, context_settings=CONTEXT)
@click.version_option(prog_name="topw", **_VERSION)
def topw() -> None:
    """Top-W decoding inside the ONNX graph: export a language model with its sampler, and run it.

    Every option can also be set by an environment variable, named after its first name: --seed of
    `topw generate` is TOPW_GENERATE_SEED. Separate the values of a repeatable option with spaces.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `topw`."""
    sys.excepthook = _show_traceback
    sys.exit(run(topw, "topw", "TOPW", args))


def export_main(args: Sequence[str] | None = None) -> None:
    """Entry point of `topw-export`."""
    sys.excepthook = _show_traceback
    sys.exit(run(None, "topw-export", "TOPW_EXPORT", args))


def _export_program() -> click.Command:
    command = copy.copy(_load_command("export"))
    command.params = list(command.params)
    return click.version_option(prog_name="topw-export", **_VERSION)(command)


def run(command: click.Command | None, program: str, prefix: str, args: Sequence[str] | None) -> int:
    """Run a command. Returns the exit code.

    command: None for `topw-export`.
    program: name of the program.
    prefix: first part of the names of environment variables.
    args: the arguments; None for those of the process.
    """
    warnings.showwarning = _show_note
    if not prepare_streams():
        return _report_failure("standard output is closed; redirect it to a file or to the null device.")
    words = list(sys.argv[1:] if args is None else args)
    try:
        command = command or _export_program()
        click_options: dict[str, Any] = {**CONTEXT, "auto_envvar_prefix": prefix}
        result = command.main(args=words, prog_name=program, standalone_mode=False, **click_options)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _report_usage_error(error)
    except TopWError as error:
        message = with_flags(error, words)
        if isinstance(error, ParameterError) and is_set_by_user(error):
            return _report_usage_error(click.UsageError(message, context_of(error)))
        return _report_failure(message)
    except ModuleNotFoundError as error:
        extra = install.extra_of(error.name or "")
        if extra is None:
            raise
        return _report_failure(install.missing_message(_ACTIVITIES.get(extra, "this command"), extra))
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.filename is not None:
            return _report_failure(f"{error.filename} cannot be used: {error.strerror}; check it and its permissions.")
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        return _report_failure(f"the output cannot be written: {error.strerror}; redirect it elsewhere.")


def _discard_output() -> None:
    """Send the rest of stdout to the null device: Python flushes stdout at exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_usage_error(error: click.ClickException) -> int:
    """Print an error of click. Returns the exit code."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help
        tell(*message.split("\n"))
        return error.exit_code
    if isinstance(error, click.UsageError):
        if error.ctx is not None:
            tell(*error.ctx.get_usage().split("\n"), f"Try '{error.ctx.command_path} --help' for help.", "")
        message += _similar_word(error)
    tell(f"Error: {message}")
    return error.exit_code


def _similar_word(error: click.UsageError) -> str:
    """A suggestion of a similar command or value. click itself suggests similar options only."""
    known: Iterable[str] = ()
    if isinstance(error, click.BadParameter) and error.param is not None and isinstance(error.param.type, click.Choice):
        known = map(str, error.param.type.choices)
    elif error.ctx is not None and isinstance(error.ctx.command, click.Group):
        known = error.ctx.command.list_commands(error.ctx)
    typed = re.search(r"'(.*?)'", error.message)
    return suggestion(typed[1], known) if typed and not getattr(error, "possibilities", None) else ""


def _report_failure(message: str) -> int:
    """Print an error. Returns the exit code."""
    tell(f"Error: {message}")
    return 1


def _show_note(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on one line; in place of `warnings.showwarning`."""
    tell(f"Note: {message}")


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback with control characters escaped, because messages may have names of files."""
    import traceback

    for part in traceback.format_exception(kind, error, trace):
        tell(*part.removesuffix("\n").split("\n"))

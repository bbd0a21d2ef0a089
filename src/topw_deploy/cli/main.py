"""`topw` and `topw-export`: run a command and report errors.

Exit codes: 0 success; 1 failure, with one sentence on stderr (none for a closed pipe); 2 wrong usage or option value;
130 interrupted. Commands are imported when called, for a fast `topw --help`.
"""

from __future__ import annotations

import copy
import difflib
import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, cast

import click
from click.core import ParameterSource

from topw_deploy import install
from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.terminal import prepare_streams, tell
from topw_deploy.errors import ParameterError, TopWError

COMMANDS = {
    "export": ("export", "Export a model with its sampler into one ONNX graph. (needs [export])"),
    "export-sampler": ("export", "Export the sampler alone, for logits from elsewhere. (needs [export])"),
    "check": ("export", "Ask TensorRT's parser which nodes of an exported model it takes."),
    "build-engine": ("engines", "Build a TensorRT engine of an exported model, for this machine."),
    "generate": ("generate", "Generate text with an exported model; also called `run`."),
    "chat": ("generate", "Chat with an exported model."),
    "serve": ("serve", "Serve exported models over HTTP, with the endpoints of OpenAI's API. (needs [serve])"),
    "triton": ("serve", "Add an exported model to a model repository of NVIDIA's Triton Inference Server."),
    "web": ("serve", "Write a static site that runs an exported model in the browser."),
    "stats": ("lab", "Show what Top-W did to a text: kept sets, and whether geometry acted. (needs [export])"),
    "compare": ("lab", "Compare texts of several sampling rules and temperatures. (needs [compare])"),
    "lm-eval": ("lab", "Evaluate an exported model on tasks of lm-evaluation-harness. (needs [lm-eval])"),
    "inspect": ("inspect", "Show the contents of an exported folder."),
    "verify": ("export", "Check an exported folder again. (more with [export])"),
    "bench": ("bench", "Time sampling and decoding, compared with other libraries. (more with [export])"),
    "plugins": ("engines", "Build the native libraries for GPUs."),
    "doctor": ("doctor", "Show versions, providers and missing parts."),
}
"""Command -> (its module in `topw_deploy.cli`, its line in `topw --help`). The function has the command's name."""

_ALIASES = {"run": "generate"}

_ELSEWHERE = {
    "weight-format outtype quantize quantization precision fp16": "dtype",
    "q4 q4_0 q4_1 q4_k_m q4_k_s 4bit nf4": "int4",
    "q8 q8_0 8bit": "int8",
    "group-size": "block-size",
    "out output-dir outfile": "output",
    "hf-token": "token",
    "c ctx-size num-ctx context-length max-model-len max-seq-len": "max-context max-length max-sequence",
    "n-predict predict num-predict length tokens": "max-tokens max-new-tokens",
    "n samples": "num-return-sequences",
    "repeat-penalty": "repetition-penalty",
    "prompt-file": "file",
    "system-prompt": "system",
    "gpu n-gpu-layers": "device",
    "max-num-seqs parallel n-parallel max-batch-size": "max-batch",
    "enable-prefix-caching": "reuse-prefixes",
    "allowed-origins": "cors-origin",
    "tool-call-parser": "tool-parser",
    "alias": "served-model-name",
    "convert quantize pull create": "export",
    "show list ls": "inspect",
}
"""Names in llama.cpp, ollama, vLLM and optimum -> options, values and commands here; the first that exists fits."""

_EXTRAS_NOTE = "[export] is the extra with torch and onnx; if it is missing, `topw doctor` shows how to install it."

_INTERRUPTED = 130
_VERSION: dict[str, Any] = {"package_name": "topw-deploy", "message": "%(prog)s %(version)s"}
# Errors of writing to stdout: a full disk or a closed descriptor, for example.
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _LazyGroup(click.Group):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = _ALIASES.get(cmd_name, cmd_name)
        return _load_command(name) if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in COMMANDS.items()])
        formatter.write_paragraph()
        formatter.write_text(_EXTRAS_NOTE)


def _load_command(name: str) -> click.Command:
    module = importlib.import_module(f"topw_deploy.cli.{COMMANDS[name][0]}")
    command: click.Command = getattr(module, name.replace("-", "_"))
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    for each in (command, *inner):
        each.context_class = RunningContext
    return command


@click.group(cls=_LazyGroup, context_settings=CONTEXT)
@click.version_option(prog_name="topw", **_VERSION)
def topw() -> None:
    """Top-W decoding inside the ONNX graph: export a language model with its sampler, and run it.

    Every option can also be set by an environment variable, named after its first name: --seed of
    `topw generate` is TOPW_GENERATE_SEED. Separate the values of a repeatable option with spaces.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `topw`."""
    sys.exit(run(topw, "topw", "TOPW", args))


def export_main(args: Sequence[str] | None = None) -> None:
    """Entry point of `topw-export`."""
    sys.exit(run(None, "topw-export", "TOPW_EXPORT", args))


def run(command: click.Command | None, program: str, prefix: str, args: Sequence[str] | None) -> int:
    """Run a command. Returns the exit code.

    command: None for `topw-export`.
    program: name of the program.
    prefix: first part of the names of environment variables.
    args: the arguments; None for those of the process.
    """
    warnings.showwarning = lambda message, *_, **__: tell(f"Note: {message}")
    if not prepare_streams():
        return _fail("standard output is closed; redirect it to a file or to the null device.")
    words = list(sys.argv[1:] if args is None else args)
    try:
        if command is None:
            command = copy.copy(_load_command("export"))
            command.params = list(command.params)
            click.version_option(prog_name=program, **_VERSION)(command)
        click_options: dict[str, Any] = {**CONTEXT, "auto_envvar_prefix": prefix}
        result = command.main(args=words, prog_name=program, standalone_mode=False, **click_options)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _report_usage_error(error)
    except TopWError as error:
        message, context = _explain(error, words)
        if isinstance(error, ParameterError) and context is not None:
            return _report_usage_error(click.UsageError(message, context))
        return _fail(message)
    except ModuleNotFoundError as error:
        extra = install.extra_of(error.name or "")
        if extra is None:
            raise
        return _fail(install.missing_message("this command", extra))
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.filename is not None:
            return _fail(f"{error.filename} cannot be used: {error.strerror}; check it and its permissions.")
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _discard_output()
        return _fail(f"the output cannot be written: {error.strerror}; redirect it elsewhere.")


def _discard_output() -> None:
    """Send the rest of stdout to the null device: Python flushes stdout at exit, and would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_usage_error(error: click.ClickException) -> int:
    """Print an error of click. Returns the exit code."""
    message = error.message if isinstance(error, click.NoSuchOption) else error.format_message()
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
    """A suggestion of a similar command, value or option; click's own suggestions of options include distant ones."""
    known: Iterable[str] = ()
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        for each in error.ctx.command.params:
            name = each.make_metavar(error.ctx).strip("[].")
            if isinstance(each, click.Argument) and f"--{name.lower()}" == error.option_name:
                return f" Give {name} without {error.option_name}."
        known = (flag for each in error.ctx.command.params for flag in (*each.opts, *each.secondary_opts))
        return _suggestion(error.option_name, (flag for flag in known if flag.startswith("--")))
    parameter = error.param if isinstance(error, click.BadParameter) else None
    kind = None if parameter is None else getattr(parameter.type, "kind", parameter.type)  # of each value in a list
    if isinstance(kind, click.Choice):
        known = map(str, kind.choices)
    elif error.ctx is not None and isinstance(error.ctx.command, click.Group):
        known = error.ctx.command.list_commands(error.ctx)
    typed = re.search(r"'(.*?)'", error.message)
    if typed is None or getattr(error, "possibilities", None):
        return ""
    return _suggestion(typed[1], known)


def _suggestion(typed: str, known: Iterable[str]) -> str:
    """A question that names what `typed` may stand for; "" if nothing is near."""
    names, word = {name.lstrip("-"): name for name in known}, typed.lstrip("-").lower()
    elsewhere = [ours for theirs, found in _ELSEWHERE.items() if word in theirs.split() for ours in found.split()]
    near = [name for name in elsewhere if name in names][:1]
    near = near or [name for name in names if len(word) > 2 and f"-{word}-" in f"-{name}-"]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=0.76)
    return f" Did you mean {' or '.join(repr(names[name]) for name in near)}?" if near else ""


def _fail(message: str) -> int:
    """Print an error. Returns the exit code."""
    tell(f"Error: {message}")
    return 1


_CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")  # options that set the parameter structured_outputs

# Python parameter -> name of its option, where the two differ.
_OPTION_OF_PARAMETER = {"intra_op_num_threads": "threads", "max_length": "max_context"}
_SET_BY_USER = {ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP}


class RunningContext(click.Context):
    """A context that attaches itself to errors, because click does not record the command in them."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, TopWError):
            error.__dict__.setdefault("context", self)
        return super().__exit__(kind, error, trace)


def _explain(error: TopWError, words: Sequence[str]) -> tuple[str, click.Context | None]:
    """The message of `error`, with options instead of Python parameters.

    words: the arguments of the command line, for the spelling of the options.

    Returns (message, the context of the command if the user set one of the parameters, otherwise None).
    """
    message, context = str(error), cast("click.Context | None", error.__dict__.get("context"))
    is_set = False
    if context is not None:
        for name in _CONSTRAINTS:
            if context.params.get(name):
                message = re.sub(r"\bstructured_outputs(\['\w+'\])*", f"--{name.replace('_', '-')}", message)
                is_set = True
        for name in sorted(error.parameters, key=len, reverse=True):  # max_length before a name such as max
            option = _option_of(context, name)
            if option is not None:
                message = _replace_name(message, name, _option_text(option, context, words), option.opts)
                is_set |= context.get_parameter_source(str(option.name)) in _SET_BY_USER
    return message, context if is_set else None


def _option_of(context: click.Context, name: str) -> click.Parameter | None:
    """The option or argument of the Python parameter `name`; None if the command has none."""
    options = {option.name: option for option in context.command.params}
    return options.get(name) or options.get(f"no_{name}") or options.get(_OPTION_OF_PARAMETER.get(name, name))


def _option_text(option: click.Parameter, context: click.Context, words: Sequence[str]) -> str:
    """The option as the user typed it, or else its environment variable or longest name; the name of an argument."""
    if isinstance(option, click.Argument):
        return option.human_readable_name.strip("[].")
    if context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT:
        own = option.envvar if isinstance(option.envvar, str) and option.envvar in os.environ else None
        return own or f"{context.auto_envvar_prefix}_{str(option.name).upper()}"
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    flags = [*option.opts, *option.secondary_opts]
    return next((flag for flag in flags if flag in typed), max(option.opts[:2], key=len))


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

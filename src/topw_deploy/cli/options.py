"""The options that several commands share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS
from topw_deploy.sampling.parameters import METRICS, PARAMETER_NAMES, POTENTIALS, PRESETS, beta_coefficients
from topw_deploy.sampling.rules import RULES
from topw_deploy.text import decode_text

Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT: dict[str, Any] = {
    # Optimum has options such as --cache_dir, so underscores are read as hyphens.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
}
"""`context_settings` of every command."""

NEEDS_EXPORT = "Needs the extra [export]; `topw doctor` shows how to install it."
"""`epilog` of the commands that need the extra [export]."""


class _Beta(click.ParamType):
    """A type of option: a float, or a text that depends on the temperature (`beta_coefficients`)."""

    name = "float|a+b*t"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        with contextlib.suppress(ValueError):
            return float(value)
        try:
            beta_coefficients(value)
        except ParameterError as error:
            self.fail(str(error), param, ctx)
        return value


_SETTINGS: Mapping[str, dict[str, Any]] = {
    "beta": {"type": _Beta()},
    "stop_strings": {"metavar": "TEXT", "multiple": True},
    "logit_bias": {"metavar": "ID=BIAS", "multiple": True},
}
"""Parameter -> the settings of its option, where they do not follow from the parameter's type."""

OPTION_PARAMETERS = tuple(name for name, parameter in PARAMETERS.items() if "command" in parameter.places)
"""The parameters of a generation that `topw generate` takes as options."""


def parameter_options(*names: str) -> Callable[[Command], Command]:
    """Add the options of parameters of a generation, as the table in `runtime.parameters` describes them.

    Options that may be repeated have the value () if they are not given, others None.
    """
    return lambda command: _add_options(command, tuple(map(_parameter_option, names)))


def _parameter_option(name: str) -> Callable[[Command], Command]:
    parameter = PARAMETERS[name]
    spellings = [name, *(alias for alias, ours in ALIASES.items() if ours == name)]
    flags = [f"-{each}" if len(each) == 1 else f"--{each.replace('_', '-')}" for each in spellings]
    kind = click.Choice(parameter.choices) if parameter.choices else parameter.kind
    settings: dict[str, Any] = {"is_flag": True} if kind is bool else {"type": kind}
    default = "" if parameter.default in (None, (), {}, False) else f"  [default: {parameter.default:g}]"
    settings |= {"default": None, "help": f"{parameter.text}{default}", **_SETTINGS.get(name, {})}
    return click.option(*flags, name, **settings)


def _parse_rule_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(RULES) if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def sampler_options(command: Command) -> Command:
    """Add the options that exports with and without a decoder share (`export.options.SamplerKeywords`)."""
    options = (
        click.option(
            "--branches/--no-branches",
            default=True,
            show_default=True,
            help="Whether the sampler's function skips work by branches; without, it has no control flow.",
        ),
        click.option(
            "--rules",
            metavar="RULE,...",
            default=None,
            callback=_parse_rule_names,
            help="Sampling rules that requests may use; Top-W always. Fewer make --no-branches faster.  [default: all]",
        ),
        click.option(
            "--preset",
            type=click.Choice(tuple(PRESETS)),
            default="paper",
            show_default=True,
            help="Named set of values for the sampler options that are not given.",
        ),
        click.option("--top-m", "--m", "top_m", type=int, help="Number of candidate tokens, >= 1."),
        click.option("--alt-iters", type=int, help="Maximum number of alternations, >= 1."),
        click.option("--metric", type=click.Choice(METRICS), help="Token distance."),
        click.option(
            "--potential",
            type=click.Choice(POTENTIALS),
            help="Distance of a token to the kept set: the smallest, or the mean of the k smallest.",
        ),
        click.option("--knn-k", type=int, help="k of the knn potential, >= 1."),
        click.option(
            "--neighbour-bound/--no-neighbour-bound",
            default=False,
            show_default=True,
            help="Measure and store each token's distance to its nearest neighbour, which saves distances at run time.",
        ),
        parameter_options(*PARAMETER_NAMES),
        click.option("--with-mass", is_flag=True, help="Add an output with the kept set's probability mass."),
        click.option("--with-keep-mask", is_flag=True, help="Add an output with the kept set, a bool per token."),
        click.option("--dry-run", is_flag=True, help="Show what would be written, with sizes; write nothing."),
        click.option("--overwrite", "--force", is_flag=True, help="Replace an earlier export in OUT at the very end."),
        click.option("--no-verify", is_flag=True, help="Do not compare the export with its source."),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        quiet_option,
        click.option("--revision", default=None, help="Branch, tag or commit of a hub model."),
        click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the hub's cache."),
        click.option("--token", envvar="HF_TOKEN", default=None, help="Access token for the hub.  [env: HF_TOKEN]"),
        click.option("--local-files-only", is_flag=True, help="Use the hub's cache only; never go online."),
    )
    return _add_options(command, options)


def quantisation_options(command: Command) -> Command:
    """Add the options for int4 and int8, with the names of onnxruntime's tools. Their default is None."""
    options = (
        click.option(
            "--compute-dtype",
            type=click.Choice(("fp32", "fp16")),
            default=None,
            help="int4, int8: type of everything but the weights, cache included; fp16 suits GPUs.  [default: fp32]",
        ),
        click.option(
            "--block-size",
            "--int4-block-size",
            "block_size",
            type=click.Choice(("16", "32", "64", "128", "256")),
            callback=_parse_integer,
            help="int4, int8: number of weights that share a scale.  [default: 128]",
        ),
        click.option(
            "--table-bits",
            type=click.Choice(("4", "8")),
            callback=_parse_integer,
            help="int4: bits of the token table and the output head.  [default: 8]",
        ),
        click.option(
            "--symmetric/--asymmetric",
            default=None,
            help="int4, int8: quantise without or with zero points.  [default: asymmetric]",
        ),
        click.option(
            "--accuracy-level",
            "--int4-accuracy-level",
            "accuracy_level",
            type=click.Choice(("0", "1", "2", "3", "4")),
            callback=_parse_integer,
            help="int4, int8: lowest precision for activations: 1 float32, 2 float16, 3 bfloat16, 4 int8, 0 unset.  "
            "[default: 4]",
        ),
        click.option(
            "--exclude-nodes",
            "--nodes-to-exclude",
            "exclude_nodes",
            metavar="PATTERN",
            multiple=True,
            help="int4, int8: do not quantise nodes or weights with a matching name ('*' and '?'). Repeatable.",
        ),
    )
    return _add_options(command, options)


def _parse_integer(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


quiet_option = click.option("-q", "--quiet", is_flag=True, help="Do not show progress on stderr.")


_OPENING_NAMES = {
    "provider": "provider",
    "threads": "intra_op_num_threads",
    "sampler": "sampler",
    "allow_fallback": "allow_fallback",
}
"""Name of an option in `opening_options` -> its name in `TopWModel.from_pretrained`."""


def opening_options(command: Command) -> Command:
    """Add the options that open a model; `take_opening` takes their values."""
    options = (
        click.option(
            "--provider", default="auto", show_default=True, help="Execution provider: auto, cpu, cuda, tensorrt, ..."
        ),
        click.option(
            "--threads", type=click.IntRange(min=0), help="Threads of one operator; 0 lets onnxruntime choose."
        ),
        click.option(
            "--sampler",
            type=click.Choice(("auto", "native", "graph")),
            default="auto",
            show_default=True,
            help="Implementation of the sampler: the native operator, the graph's own function, or the first one "
            "available.",
        ),
        click.option("--allow-fallback", is_flag=True, help="Use another provider if this one does not start."),
    )
    return _add_options(command, options)


def take_opening(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `opening_options`. Returns them as keywords of `TopWModel.from_pretrained`."""
    return {keyword: values.pop(name) for name, keyword in _OPENING_NAMES.items()}


def _add_options(command: Command, options: tuple[Callable[[Command], Command], ...]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def require_folder_first(folder: Path, others: Iterable[str]) -> None:
    """Raises UsageError if `folder` does not exist, but one of the other arguments is an exported folder."""
    if os.path.exists(folder):
        return
    from topw_deploy.manifest import MANIFEST_NAME

    for word in others:
        if os.path.isfile(os.path.join(word, MANIFEST_NAME)):
            raise click.UsageError(f"{folder} does not exist, but {word} is an exported folder; OUT comes first.")


def take_given(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Remove `names` from `values`. Returns the values that are not None, by name."""
    removed = {name: values.pop(name, None) for name in names}
    return {name: value for name, value in removed.items() if value is not None}


_CONSTRAINT_KEYS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Option -> its key in `structured_outputs`."""


def constraint_options(command: Command) -> Command:
    """Add the options whose values `take_constraint` takes. Their default is None or empty."""
    options = (
        click.option(
            "--json-schema", "-j", metavar="SCHEMA", help="Answer in JSON that matches this schema, or @FILE."
        ),
        click.option(
            "--regex", metavar="EXPR", help="Answer with a text that fully matches this expression, or @FILE."
        ),
        click.option("--choice", metavar="TEXT", multiple=True, help="Answer with one of these texts. Repeatable."),
        click.option("--grammar", metavar="TEXT", help="Answer with a text of this Lark or GBNF grammar, or @FILE."),
    )
    return _add_options(command, options)


def take_constraint(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `constraint_options`. Returns `structured_outputs`, if they set it.

    Raises UsageError if more than one option says what the text must match, or if a file cannot be read.
    """
    constraints = {name: value for name in _CONSTRAINT_KEYS if (value := values.pop(name)) not in (None, ())}
    parameters: dict[str, Any] = {}
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

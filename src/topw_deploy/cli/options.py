"""The options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from topw_deploy.errors import ParameterError
from topw_deploy.runtime.parameters import ALIASES, PARAMETERS
from topw_deploy.sampling.parameters import METRICS, PARAMETER_NAMES, POTENTIALS, PRESETS, beta_coefficients
from topw_deploy.text import decode_text, parse_size

Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT: dict[str, Any] = {
    # Optimum has options such as --cache_dir, so underscores are read as hyphens.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "show_default": True,
}
"""`context_settings` of every command."""

NEEDS_EXPORT = "Needs the extra [export]; `topw doctor` shows how to install it."
"""`epilog` of the commands that need the extra [export]."""

PATH = click.Path(path_type=Path)
PATH_OR_STREAM = click.Path(path_type=Path, allow_dash=True)  # - is a standard stream
FILE = click.Path(path_type=Path, dir_okay=False)
COUNT = click.IntRange(min=1)


class Parsed(click.ParamType):
    """A type of option whose text `parse` reads. Its ParameterError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ParameterError as error:
            self.fail(str(error), param, ctx)


def _parse_beta(text: str) -> float | str:
    """A number, or a text that depends on the temperature."""
    try:
        return float(text)
    except ValueError:
        beta_coefficients(text)
        return text


SIZE = Parsed("size", parse_size)
"""Bytes, as a number or as 500MB, 2GB or 2GiB."""

SHORT_FLAGS: dict[str, tuple[str, ...]] = {"max_new_tokens": ("-n",), "temperature": ("--temp",)}
"""Parameter -> flags of other tools beside those of its names."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "beta": {"type": Parsed("float|a+b*t", _parse_beta)},
    "stop_strings": {"metavar": "TEXT", "multiple": True},
    "logit_bias": {"metavar": "ID=BIAS", "multiple": True},
}
"""Parameter -> the settings of its option, where they do not follow from the parameter's type."""

OPTION_PARAMETERS = tuple(name for name, parameter in PARAMETERS.items() if "command" in parameter.places)
"""The parameters of a generation that `topw generate` takes as options."""


def option_group(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds several options."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def parameter_options(*names: str) -> Callable[[Command], Command]:
    """Add the options of parameters of a generation, as the table in `runtime.parameters` describes them.

    Options that may be repeated have the value () if they are not given, others None.
    """
    return option_group(*map(_parameter_option, names))


def _parameter_option(name: str) -> Callable[[Command], Command]:
    parameter = PARAMETERS[name]
    spellings = [name, *(alias for alias, ours in ALIASES.items() if ours == name and len(alias) > 1)]
    flags = [*map(flag_of, spellings), *SHORT_FLAGS.get(name, ())]
    kind = click.Choice(parameter.choices) if parameter.choices else parameter.kind
    settings: dict[str, Any] = {"is_flag": True} if kind is bool else {"type": kind}
    default = "" if parameter.default in (None, (), {}, False) else f"  [default: {parameter.default:g}]"
    settings |= {"default": None, "help": f"{parameter.text}{default}", **_SETTINGS.get(name, {})}
    return click.option(*flags, name, **settings)


def flag_of(name: str) -> str:
    """`--top-k` for `top_k`."""
    return f"--{name.replace('_', '-')}"


quiet_option = click.option("-q", "--quiet", is_flag=True, help="Do not show progress on stderr.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
json_file_option = click.option(
    "--json", "json_file", type=PATH_OR_STREAM, help="Write the report as JSON; - is standard output."
)
force_option = click.option(
    "--overwrite", "--force", is_flag=True, help="Replace what an earlier run wrote there, at the very end."
)

sampler_options = option_group(
    click.option(
        "--branches/--no-branches",
        default=True,
        help="Whether the sampler's function skips work by branches; without, it has no control flow.",
    ),
    click.option(
        "--rules",
        metavar="RULE,...",
        type=Parsed("rules", lambda text: tuple(text.replace(",", " ").split())),
        help="Sampling rules that requests may use; Top-W always. Fewer make --no-branches faster.  [default: all]",
    ),
    click.option(
        "--preset",
        type=click.Choice(tuple(PRESETS)),
        default="paper",
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
        help="Measure and store each token's distance to its nearest neighbour, which saves distances at run time.",
    ),
    parameter_options(*PARAMETER_NAMES),
    click.option("--with-mass", is_flag=True, help="Add an output with the kept set's probability mass."),
    click.option("--with-keep-mask", is_flag=True, help="Add an output with the kept set, a bool per token."),
    click.option("--dry-run", is_flag=True, help="Show what would be written, with sizes; write nothing."),
    force_option,
    click.option("--no-verify", is_flag=True, help="Do not compare the export with its source."),
    json_option,
    quiet_option,
    click.option("-v", "--verbose", is_flag=True, help="Show each check, and what the decoder was lowered to."),
    click.option("--revision", help="Branch, tag or commit of a hub model."),
    click.option("--gguf-file", metavar="NAME", help="The GGUF file to read in MODEL, a folder or a hub id."),
    click.option("--cache-dir", type=PATH, help="Folder of the hub's cache."),
    click.option("--token", envvar="HF_TOKEN", help="Access token for the hub.  [env: HF_TOKEN]"),
    click.option("--local-files-only", is_flag=True, help="Use the hub's cache only; never go online."),
)
"""The options that exports with and without a decoder share (`export.options.SamplerKeywords`)."""

quantisation_options = option_group(
    click.option(
        "--compute-dtype",
        type=click.Choice(("fp32", "fp16")),
        help="int4, int8: type of everything but the weights, cache included; fp16 suits GPUs.  [default: fp32]",
    ),
    click.option(
        "--block-size",
        "--int4-block-size",
        "block_size",
        type=int,
        help="int4, int8: number of weights that share a scale: 16, 32, 64, 128 or 256.  [default: 128]",
    ),
    click.option(
        "--table-bits", type=int, help="int4: bits of the token table and the output head, 4 or 8.  [default: 8]"
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
        type=int,
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
    click.option(
        "--calibration",
        metavar="FILE",
        help="int4: text for which the weights are rounded; 'none' rounds to nearest.  [default: a bundled text]",
    ),
    click.option(
        "--average-bits",
        type=float,
        metavar="BITS",
        help="int4: the largest average bits of a weight, with scales and zero points; the products that lose most get "
        "8 bits.  [default: 5.5]",
    ),
)
"""The options for int4 and int8, with the names of onnxruntime's tools. Their default is None."""

opening_options = option_group(
    click.option("--provider", "--device", default="auto", help="Execution provider: auto, cpu, cuda, tensorrt, ..."),
    click.option("--threads", type=click.IntRange(min=0), help="Threads of one operator; 0 lets onnxruntime choose."),
    click.option(
        "--sampler",
        type=click.Choice(("auto", "native", "graph")),
        default="auto",
        help="Implementation of the sampler: the native operator, the graph's own function, or the first that works.",
    ),
    click.option("--allow-fallback", is_flag=True, help="Use another provider if this one does not start."),
)
"""The options that open a model; `take_opening` takes their values."""

draft_model_option = click.option(
    "--draft-model",
    metavar="FOLDER",
    type=PATH,
    help="Exported smaller model with the same tokenizer, to draft tokens.",
)


def take_words(words: Sequence[str], most: int | None = None, **options: Any) -> list[Any]:
    """The values of arguments that may also be options, then the other words, of which there are at most `most`.

    words: on the command line, for the options that are not given, in their order.
    options: name of an argument in messages -> value of its option; None if it is not given.

    Raises UsageError for a missing argument, and for more words.
    """
    rest, values = list(words), list[Any]()
    for name, value in options.items():
        if value is None and not rest:
            raise click.UsageError(f"Missing argument '{name}'.")
        values.append(rest.pop(0) if value is None else value)
    if most is not None and len(rest) > most:
        raise click.UsageError(f"Got unexpected extra argument ({rest[most]}).")
    return [*values, *rest]


def take_opening(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `opening_options`. Returns them as keywords of `TopWModel.from_pretrained`."""
    same = {name: values.pop(name) for name in ("provider", "sampler", "allow_fallback")}
    return {**same, "intra_op_num_threads": values.pop("threads")}


def take_given(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Remove `names` from `values`. Returns the values that are neither None nor (), by name."""
    removed = {name: values.pop(name) for name in names}
    return {name: value for name, value in removed.items() if value not in (None, ())}


model_option = click.option("-m", "--model", metavar="MODEL", help="MODEL, given as an option.")

constraint_options = option_group(
    click.option("--json-schema", "-j", metavar="SCHEMA", help="Answer in JSON that matches this schema, or @FILE."),
    click.option("--regex", metavar="EXPR", help="Answer with a text that fully matches this expression, or @FILE."),
    click.option("--choice", metavar="TEXT", multiple=True, help="Answer with one of these texts. Repeatable."),
    click.option("--grammar", metavar="TEXT", help="Answer with a text of this Lark or GBNF grammar, or @FILE."),
)
"""The options whose values `take_constraint` takes."""


def take_constraint(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the values of `constraint_options`. Returns the parameter `structured_outputs`, if they set it.

    Raises UsageError if more than one option says what the text must match, or if a file cannot be read.
    """
    constraints = take_given(values, ("json_schema", "regex", "choice", "grammar"))
    if len(constraints) > 1:
        raise click.UsageError(f"give only one of {', '.join(map(flag_of, constraints))}.")
    for name, value in constraints.items():
        text: Any = list(value) if name == "choice" else value
        if name != "choice" and value.startswith("@"):
            try:
                text = decode_text(Path(value[1:]).read_bytes(), value[1:])
            except OSError as error:
                why = error.strerror or error
                raise click.UsageError(f"{flag_of(name)}: {os.fsdecode(value[1:])} cannot be read: {why}.") from None
        return {"structured_outputs": {name.removesuffix("_schema"): text}}
    return {}

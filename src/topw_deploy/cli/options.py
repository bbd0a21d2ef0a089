"""The options that several commands share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.beta import beta_coefficients
from topw_deploy.sampling.parameters import METRICS, OPTION_NAMES, PARAMETER_NAMES, POTENTIALS, PRESETS
from topw_deploy.sampling.presets import GEOM_UNITS, REQUEST_PRESETS
from topw_deploy.sampling.rules import RULE_OF_VALUE, RULES

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

_PARAMETER_HELP = {
    "lam": (("--lam", "--lambda-geom"), "Weight of the entropy term, >= 0."),
    "beta": (("--beta",), "Weight of the log-mass reward, >= 0; may depend on --temperature T, as 1.5+1.5*T."),
    "temperature": (("--temperature",), "Sampling temperature, >= 0; below 1e-5, sampling is greedy."),
    "selection_temperature": (
        ("--selection-temperature",),
        "Temperature for choosing the crop; 0 uses --temperature.",
    ),
    "init_top_p": (("--init-top-p", "--warm-p"), "Probability mass of the initial nucleus, in (0, 1]."),
    "geom_scale": (("--geom-scale",), "Factor on token distances; negative values repel."),
}
_OPTION_HELP: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "top_m": (("--top-m", "--m"), {"type": int}, "Number of candidate tokens, >= 1."),
    "alt_iters": (("--alt-iters",), {"type": int}, "Maximum number of alternations, >= 1."),
    "metric": (("--metric",), {"type": click.Choice(METRICS)}, "Token distance."),
    "potential": (
        ("--potential",),
        {"type": click.Choice(POTENTIALS)},
        "Distance of a token to the crop: the smallest, or the mean of the k smallest.",
    ),
    "knn_k": (("--knn-k",), {"type": int}, "k of the knn potential, >= 1."),
}


class _Beta(click.ParamType):
    """A type of option: a float, or a text that depends on the temperature (`sampling.beta`)."""

    name = "float|a+b*t"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        with contextlib.suppress(ValueError):
            return float(value)
        try:
            beta_coefficients(value)
        except ParameterError as error:
            self.fail(str(error), param, ctx)
        return value


def parameter_options(command: Command) -> Command:
    """Add the options for Top-W's parameters. Their default is None."""
    for name in reversed(PARAMETER_NAMES):
        names, text = _PARAMETER_HELP[name]
        kind = _Beta() if name == "beta" else float
        command = click.option(*names, name, type=kind, default=None, help=text)(command)
    return command


def geom_unit_option(command: Command) -> Command:
    """Add --geom-unit, for a request. Its default is None."""
    return click.option(
        "--geom-unit",
        type=click.Choice(GEOM_UNITS),
        default=None,
        help="Unit of --geom-scale: the metric's, or the model's median distance of likely tokens.  [default: raw]",
    )(command)


_RULE_HELP = {
    "top_k": (int, "Keep the k best tokens, >= 1."),
    "top_p": (float, "Keep the fewest best tokens with at least this probability in total, in (0, 1]."),
    "min_p": (float, "Keep tokens with at least this fraction of the best one's probability, in [0, 1]."),
    "top_h": (float, "Keep the best tokens up to this share of the pool's entropy, in (0, 1].  [default: 0.4]"),
    "top_h_pool": (int, "Number of best tokens in the pool, >= 1.  [default: 100]"),
    "typical_p": (float, "Keep the most typical tokens with at least this probability in total, in (0, 1)."),
    "epsilon_cutoff": (float, "Keep tokens with at least this probability, in (0, 1)."),
    "eta_cutoff": (float, "Like epsilon, with a lower cutoff for flat distributions, in (0, 1)."),
    "top_n_sigma": (float, "Keep logits within this many standard deviations of the best one, >= 0.  [default: 1]"),
    "min_k_tau": (float, "Keep at least this number divided by the range of the logits, >= 0.  [default: 3]"),
}


def rule_options(command: Command) -> Command:
    """Add --rule, and the options for the parameters of the sampling rules. Their default is None."""
    for name, (kind, text) in reversed(_RULE_HELP.items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, name, type=kind, default=None, help=f"{RULE_OF_VALUE[name].name}: {text}")(command)
    return click.option(
        "--rule",
        type=click.Choice(tuple(RULES)),
        default=None,
        help="Sampling rule; giving only one of its parameters also chooses it.  [default: top_w]",
    )(command)


def preset_option(command: Command) -> Command:
    """Add --preset, for a request. Its default is None."""
    return click.option(
        "--preset",
        type=click.Choice(tuple(REQUEST_PRESETS)),
        default=None,
        help="Named set of Top-W parameters; the options below override it.  [default: the export's parameters]",
    )(command)


def baked_options(command: Command) -> Command:
    """Add --preset, for an export, and the options that are stored in the graph, whose default is None."""
    for name in reversed(OPTION_NAMES):
        names, settings, text = _OPTION_HELP[name]
        command = click.option(*names, name, default=None, help=text, **settings)(command)
    preset = click.option(
        "--preset",
        type=click.Choice(tuple(PRESETS)),
        default="paper",
        show_default=True,
        help="Named set of values for the sampler options that are not given.",
    )
    return preset(command)


def branches_option(command: Command) -> Command:
    """Add --no-branches, for a sampler's function without control flow."""
    return click.option(
        "--branches/--no-branches",
        default=True,
        show_default=True,
        help="Whether the sampler's function skips work by branches; without, it has no control flow.",
    )(command)


def rules_option(command: Command) -> Command:
    """Add --rules, the sampling rules of the sampler's function."""
    return click.option(
        "--rules",
        metavar="RULE,...",
        default=None,
        callback=_parse_rule_names,
        help="Sampling rules that requests may use; Top-W always. Fewer make --no-branches faster.  [default: all]",
    )(command)


def _parse_rule_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(RULES) if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def bound_option(command: Command) -> Command:
    """Add --neighbour-bound, for an export."""
    return click.option(
        "--neighbour-bound/--no-neighbour-bound",
        default=False,
        show_default=True,
        help="Measure and store each token's distance to its nearest neighbour, which saves distances at run time.",
    )(command)


def quantisation_options(command: Command) -> Command:
    """Add the options for int4 and int8, with the names of onnxruntime's tools. Their default is None."""
    choices = {
        "block_size": ("16", "32", "64", "128", "256"),
        "accuracy_level": ("0", "1", "2", "3", "4"),
        "algorithm": ("search", "default", "rtn", "k_quant"),
    }
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
            type=click.Choice(choices["block_size"]),
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
            help="int4, int8: quantise without or with zero points.  [default: symmetric for the algorithms default "
            "and rtn, else asymmetric]",
        ),
        click.option(
            "--accuracy-level",
            "--int4-accuracy-level",
            "accuracy_level",
            type=click.Choice(choices["accuracy_level"]),
            callback=_parse_integer,
            help="int4, int8: lowest precision for activations: 1 float32, 2 float16, 3 bfloat16, 4 int8, 0 unset.  "
            "[default: 4]",
        ),
        click.option(
            "--quantisation-algorithm",
            "--quantization-algorithm",
            "--algo-config",
            "--int4-algo-config",
            "quantisation_algorithm",
            type=click.Choice(choices["algorithm"]),
            default=None,
            help="int4, int8: how to choose scales; all but search are onnxruntime's.  [default: search]",
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


def hub_options(command: Command) -> Command:
    """Add the options for the hub, with the names of huggingface_hub."""
    options = (
        click.option("--revision", default=None, help="Branch, tag or commit of a hub model."),
        click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="Folder of the hub's cache."),
        click.option("--token", envvar="HF_TOKEN", default=None, help="Access token for the hub.  [env: HF_TOKEN]"),
        click.option("--local-files-only", is_flag=True, help="Use the hub's cache only; never go online."),
    )
    return _add_options(command, options)


quiet_option = click.option("-q", "--quiet", is_flag=True, help="Do not show progress on stderr.")


def report_options(command: Command) -> Command:
    """Add --json and --quiet."""
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        quiet_option,
    )
    return _add_options(command, options)


def crop_options(command: Command) -> Command:
    """Add the options for optional outputs of the sampler."""
    options = (
        click.option("--with-mass", is_flag=True, help="Add an output with the crop's probability mass."),
        click.option("--with-keep-mask", is_flag=True, help="Add an output with the crop, a bool per token."),
    )
    return _add_options(command, options)


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

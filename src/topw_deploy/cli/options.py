"""What the commands' options share: both spellings of every name, and the Top-W options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from topw_deploy.sampling.parameters import METRICS, OPTION_NAMES, PARAMETER_NAMES, POTENTIALS, PRESETS
from topw_deploy.sampling.presets import REQUEST_PRESETS

Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT: dict[str, Any] = {
    # --cache-dir and --cache_dir are one option: users of optimum and transformers type either.
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
}
"""`context_settings` of every command."""

NEEDS_EXPORT = "Needs the extra [export]; where it is missing, `topw doctor` says how to install it."
"""`epilog` of the commands that do nothing without it."""

_PARAMETER_HELP = {
    "lam": (("--lam", "--lambda-geom"), "Weight of the entropy term, >= 0."),
    "beta": (("--beta",), "Weight of the log-mass reward, >= 0."),
    "temperature": (("--temperature",), "Sampling temperature, >= 0; below 1e-5 greedy."),
    "selection_temperature": (("--selection-temperature",), "Temperature that chooses the crop; 0: as --temperature."),
    "init_top_p": (("--init-top-p", "--warm-p"), "Mass of the nucleus warm start, in (0, 1]."),
    "geom_scale": (("--geom-scale",), "Factor on distances; negative repels."),
}
_OPTION_HELP: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "top_m": (("--top-m", "--m"), {"type": int}, "Candidate pool size, >= 1."),
    "alt_iters": (("--alt-iters",), {"type": int}, "Most alternations, >= 1."),
    "metric": (("--metric",), {"type": click.Choice(METRICS)}, "Token distance."),
    "potential": (("--potential",), {"type": click.Choice(POTENTIALS)}, "Distance to the set: smallest, or mean of k."),
    "knn_k": (("--knn-k",), {"type": int}, "Neighbours of the knn potential, >= 1."),
}


def parameter_options(command: Command) -> Command:
    """One option per Top-W parameter, None where not given."""
    for name in reversed(PARAMETER_NAMES):
        names, text = _PARAMETER_HELP[name]
        command = click.option(*names, name, type=float, default=None, help=text)(command)
    return command


def preset_option(command: Command) -> Command:
    """--preset of a request: a named setting of the Top-W parameters; None where not given."""
    return click.option(
        "--preset",
        type=click.Choice(tuple(REQUEST_PRESETS)),
        default=None,
        help="Take the Top-W parameters from this setting, but for those given here.  [default: the export's]",
    )(command)


def baked_options(command: Command) -> Command:
    """--preset and one option per number that an export fixes, None where not given."""
    for name in reversed(OPTION_NAMES):
        names, settings, text = _OPTION_HELP[name]
        command = click.option(*names, name, default=None, help=text, **settings)(command)
    preset = click.option(
        "--preset",
        type=click.Choice(tuple(PRESETS)),
        default="paper",
        show_default=True,
        help="Where the rest comes from.",
    )
    return preset(command)


def tail_option(command: Command) -> Command:
    """--tail, the form of the sampler's body."""
    return click.option(
        "--tail",
        type=click.Choice(("portable", "onnxruntime", "static")),
        default="portable",
        show_default=True,
        help="Form of the sampler's body: accepted everywhere, cheapest in onnxruntime, or free of control flow.",
    )(command)


def bound_option(command: Command) -> Command:
    """--neighbour-bound, what an export may measure once."""
    return click.option(
        "--neighbour-bound/--no-neighbour-bound",
        default=False,
        show_default=True,
        help="Measure and store how near each token's nearest other is: fewer distances at run time.",
    )(command)


def quantisation_options(command: Command) -> Command:
    """How --dtype int4 and int8 quantise, in the words of onnxruntime's tools; None where not given."""
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
            help="int4, int8: type of everything but the weights, the cache included; fp16 for GPUs.  [default: fp32]",
        ),
        click.option(
            "--block-size",
            "--int4-block-size",
            "block_size",
            type=click.Choice(choices["block_size"]),
            callback=_whole,
            help="int4, int8: weights that share a scale.  [default: 128]",
        ),
        click.option(
            "--table-bits",
            type=click.Choice(("4", "8")),
            callback=_whole,
            help="int4: bits of the token table and of the head.  [default: 8]",
        ),
        click.option(
            "--symmetric/--asymmetric",
            default=None,
            help="int4, int8: without or with zero points.  [default: asymmetric; default, rtn: symmetric]",
        ),
        click.option(
            "--accuracy-level",
            "--int4-accuracy-level",
            "accuracy_level",
            type=click.Choice(choices["accuracy_level"]),
            callback=_whole,
            help="int4, int8: what activations may be rounded to: 1 float32, 2 float16, 3 bfloat16, 4 int8, 0 unset.  "
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
            help="int4, int8: how scales are found; all but search are onnxruntime's.  [default: search]",
        ),
        click.option(
            "--exclude-nodes",
            "--nodes-to-exclude",
            "exclude_nodes",
            metavar="PATTERN",
            multiple=True,
            help="int4, int8: leave these nodes or weights as they are ('*' and '?' match). Repeatable.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _whole(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


def hub_options(command: Command) -> Command:
    """Where on the hub a model is and how to get it, spelled as huggingface_hub's users know it."""
    options = (
        click.option("--revision", default=None, help="Branch, tag or commit on the hub."),
        click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="The hub's cache."),
        click.option("--token", envvar="HF_TOKEN", default=None, help="Token for the hub.  [env: HF_TOKEN]"),
        click.option("--local-files-only", is_flag=True, help="Never ask the hub."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_order(folder: Path, others: Iterable[str]) -> None:
    """Raises UsageError where the folder OUT is not there, but another argument is an exported folder."""
    if os.path.exists(folder):
        return
    from topw_deploy.manifest import MANIFEST_NAME

    for word in others:
        if os.path.isfile(os.path.join(word, MANIFEST_NAME)):
            raise click.UsageError(f"{folder} does not exist, but {word} is an exported folder; OUT comes first.")


def given(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Remove `names` from `values`; returns those that the user gave."""
    removed = {name: values.pop(name, None) for name in names}
    return {name: value for name, value in removed.items() if value is not None}

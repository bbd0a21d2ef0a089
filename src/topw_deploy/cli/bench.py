"""`topw bench`: time sampling and decoding, and compare with other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from topw_deploy.cli.options import CONTEXT, COUNT, FILE, json_file_option, option_group, quiet_option
from topw_deploy.cli.terminal import check_output, check_picture, progress, waiting, write_report
from topw_deploy.sampling.parameters import METRICS

if TYPE_CHECKING:
    from topw_lab.bench.base import Report

_EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_EXISTING_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
_TWO_OR_MORE = click.IntRange(min=2)
_THREADS = click.IntRange(1, 1024)  # some libraries start as many as requested


class _CommaSeparated(click.ParamType):
    """A type of option: comma-separated values, such as 1,2.

    kind: click's type of the values.
    name: what the values are, for messages.
    """

    def __init__(self, kind: click.ParamType, *, name: str) -> None:
        self.name, self.kind = name, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        items = tuple(self.kind.convert(part, param, ctx) for part in str(value).replace(",", " ").split())
        if not items:
            self.fail(f"the value is empty, but must list {self.name}.", param, ctx)
        return items


@click.group(name="bench", context_settings=CONTEXT)
def bench() -> None:
    """Time a sampling step, a whole decoding loop or many callers on this machine, and compare with other libraries;
    and time the loop under every sampling rule.

    All sides take turns, so a drift of the machine's speed affects all of them. Ratios are computed for each round.
    """


def _common_options(rounds: int, threads_of: str | None = None) -> Callable[[Any], Any]:
    """The options of every benchmark.

    rounds: default of --rounds.
    threads_of: what has --threads, for the help, if the option lists thread counts.
    """
    kind: click.ParamType = _THREADS
    text = "Threads of each side."
    if threads_of is not None:
        kind = _CommaSeparated(_THREADS, name="thread counts")
        text = f"Threads of {threads_of}. Comma-separated: one run per value."
    return option_group(
        click.option("--threads", type=kind, default="1", help=text),
        click.option("--rounds", type=COUNT, default=rounds, help="Number of times each side runs."),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, help="Seed of the data and of the order of the sides."
        ),
        json_file_option,
        quiet_option,
    )


_peers_option = click.option(
    "--peers",
    type=_CommaSeparated(click.STRING, name="sides"),
    help="Run only these sides, separated by commas; each must be available.",
)
_plot_option = click.option("--plot", type=FILE, help="Draw the results as a PNG.")
_prompt_tokens_option = click.option("--prompt-tokens", type=COUNT, default=128, help="Length of the random prompt.")


_genai_python_option = click.option(
    "--genai-python", type=_EXISTING_FILE, metavar="PYTHON", help="Python of an environment with onnxruntime-genai."
)


@bench.command(name="sampler", context_settings=CONTEXT)
@click.option("--vocab", type=COUNT, default=151_936, help="Vocabulary size.")
@click.option("--hidden", type=COUNT, default=2048, help="Embedding size.")
@click.option("--batch", type=COUNT, default=1, help="Sequences per step.")
@click.option(
    "--regime",
    type=_CommaSeparated(click.Choice(("certified", "flat", "uncertified")), name="regimes"),
    default="certified",
    help="Kind of logits: the kept set is certified among few candidates (certified), among many (flat), or decided by "
    "distances (uncertified). Comma-separated.",
)
@click.option(
    "--temperature",
    type=_CommaSeparated(click.FLOAT, name="temperatures"),
    help="Sampling temperature; default: the regime's own. Comma-separated.",
)
@click.option("--metric", type=click.Choice(METRICS), default="mahalanobis", help="Distance between tokens.")
@click.option("--alt-iters", type=COUNT, default=3, help="Maximum number of alternations.")
@click.option("--geom-scale", type=float, default=1.0, help="Factor on the distances.")
@click.option("--neighbour-bound", is_flag=True, help="Compute the neighbour bound first, for the tokens of the pool.")
@click.option("--logits", type=_EXISTING_FILE, help="Sample from the logits in this .npy file, [V] or [B, V].")
@_peers_option
@click.option("--authors", type=_EXISTING_FILE, help="Also time this copy of the authors' logit_processor_w1.py.")
@_genai_python_option
@_common_options(40)
@_plot_option
def sampler(regime: Any, temperature: Any, **values: Any) -> None:
    """Time one sampling step of Top-W and of every other installed sampler on the same logits.

    Before timing, every implementation of Top-W must keep the same tokens as the reference.
    """
    from topw_lab.bench.sampler import run

    _measure(run, {**values, "regimes": regime, "temperatures": temperature})


@bench.command(name="decode", context_settings=CONTEXT)
@click.argument("folder", metavar="MODEL", type=_EXISTING_FOLDER)
@_prompt_tokens_option
@click.option("--new-tokens", type=_TWO_OR_MORE, default=64, help="Tokens to generate.")
@click.option(
    "--transformers", metavar="MODEL_DIR", type=_EXISTING_FOLDER, help="The model that MODEL was exported from."
)
@click.option(
    "--genai", metavar="FOLDER", type=_EXISTING_FOLDER, help="The same model, from onnxruntime-genai's builder."
)
@_genai_python_option
@click.option(
    "--authors", type=_EXISTING_FILE, help="Also time this copy of the authors' logit_processor_w1.py in transformers."
)
@_peers_option
@_common_options(9, "each side")
@_plot_option
def decode(**values: Any) -> None:
    """Time the decoding loop of the exported model in the folder MODEL and of other libraries with the same weights.

    Each side loads the model once, in its own process; then the sides take turns.
    """
    from topw_lab.bench.decode import run

    _measure(run, values)


@bench.command(name="serve", context_settings=CONTEXT)
@click.argument("folder", metavar="MODEL", type=_EXISTING_FOLDER)
@click.option(
    "--concurrency",
    type=_CommaSeparated(click.IntRange(min=1), name="numbers of callers"),
    default="1,4,16,64",
    help="Number of callers; each sends its next request when it has the answer. Comma-separated: one run per value.",
)
@click.option(
    "--requests", type=COUNT, default=16, help="Minimum number of requests per round; there is at least one per caller."
)
@click.option("--prompt-tokens", type=COUNT, help="Mean length of prompts; default: 342, or what fits.")
@click.option("--new-tokens", type=_TWO_OR_MORE, help="Mean number of new tokens; default: 62, or what fits.")
@click.option("--rows", type=COUNT, default=16, help="Sequences that the engine runs at once.")
@click.option(
    "--prefill-budget", type=COUNT, default=256, help="Maximum number of prompt tokens that the engine reads at once."
)
@_peers_option
@_common_options(3, "the session")
def serve(**values: Any) -> None:
    """Time requests of many callers to the exported model in the folder MODEL: through the engine, and by
    `generate` one by one and in batches.

    Lengths have a log-normal distribution. The command also measures the engine's overhead, and the time to the first
    text while a long prompt is read and after a reused prefix.
    """
    from topw_lab.bench.serve import run

    _measure(run, values)


@bench.command(name="rules", context_settings=CONTEXT)
@click.argument("folders", metavar="MODEL...", nargs=-1, required=True, type=_EXISTING_FOLDER)
@click.option(
    "--rules",
    metavar="RULE[=VALUE],...",
    default="top_k=50,top_p=0.9,min_p=0.1,top_h=0.4,top_w",
    help="Rules and their values, as for `topw compare`; top_w and at least one other.",
)
@click.option("--temperatures", metavar="T1,T2,...", default="0.5,1,1.5,2", help="Temperatures.")
@click.option(
    "--samplers",
    type=_CommaSeparated(click.Choice(("native", "graph")), name="samplers"),
    help="How to open each model: with the native operator, with the function in its graph, or (default) both, one "
    "after the other. Comma-separated.",
)
@click.option("--prompt", metavar="TEXT", help="Continue this text.  [default: random tokens]")
@_prompt_tokens_option
@click.option(
    "--max-new-tokens",
    "--new-tokens",
    "new_tokens",
    type=_TWO_OR_MORE,
    default=64,
    help="Tokens to generate; EOS is ignored.",
)
@_common_options(20, "the session")
@_plot_option
def bench_rules(rules: str, temperatures: str, **values: Any) -> None:
    """Time a token of the exported models in the folders MODEL under every sampling rule and temperature, and the
    overhead of Top-W against the mean of the other rules.

    The rules share one process and session per model. A round visits every rule and temperature once, in random order.
    The shares of certified tokens explain differences.
    """
    from topw_deploy.runtime.rule_settings import read_rules, read_temperatures
    from topw_lab.bench.rules import run

    _measure(run, {**values, "rules": read_rules(rules), "temperatures": read_temperatures(temperatures)})


def _measure(run: Callable[..., Report], values: dict[str, Any]) -> None:
    """Run a benchmark with the options that are given. Prints its report, writes it as JSON, and draws it.

    Raises ParameterError, before anything is timed, for files that cannot be written.
    """
    json_file, plot, quiet = (values.pop(name, None) for name in ("json_file", "plot", "quiet"))
    check_output(json_file, "json_file")
    check_picture(plot, (".png",))
    with waiting("Measuring"):
        report = run(progress=progress(quiet), **{name: value for name, value in values.items() if value is not None})
    write_report(report.text().split("\n"), report.as_dict(), json_file)
    if plot is not None:
        report.draw(plot)

"""`topw bench`: time sampling and decoding, and compare with other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from topw_deploy.cli.options import CONTEXT, quiet_option
from topw_deploy.cli.terminal import check_output, check_picture, progress, write_report
from topw_deploy.sampling.parameters import METRICS, TopWOptions

if TYPE_CHECKING:
    from topw_lab.bench.sides import Report

Item = TypeVar("Item")
Command = TypeVar("Command", bound=Callable[..., Any])

_EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_EXISTING_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


class _CommaSeparated(click.ParamType, Generic[Item]):
    """A type of option: comma-separated values, such as 1,2.

    kind: click's type of the values.
    name: what the values are, for messages.
    """

    def __init__(self, kind: click.ParamType, *, name: str) -> None:
        self.name, self.kind = name, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Item, ...]:
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


def _common_options(threads: Any, rounds: int) -> Callable[[Command], Command]:
    """Add the options of every benchmark.

    threads: the option --threads.
    rounds: default of --rounds.
    """
    options = (
        threads,
        click.option(
            "--rounds",
            type=click.IntRange(min=1),
            default=rounds,
            show_default=True,
            help="Number of times each side runs.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Seed of the data and of the order of the sides.",
        ),
        click.option(
            "--json",
            "json_file",
            metavar="FILE",
            type=click.Path(path_type=Path, allow_dash=True),
            help="Write all results as JSON; - is standard output.",
        ),
        click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the results as a PNG."),
        quiet_option,
    )

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _threads_option(of: str) -> Callable[[Command], Command]:
    """The option --threads for several thread counts. of: what has these threads, for the help."""
    return click.option(
        "--threads",
        type=_CommaSeparated(
            click.IntRange(1, 1024), name="thread counts"
        ),  # some libraries start as many as requested
        default="1",
        show_default=True,
        help=f"Threads of {of}. Comma-separated: one run per value.",
    )


_peers_option = click.option(
    "--peers",
    type=_CommaSeparated(click.STRING, name="sides"),
    help="Run only these sides, separated by commas; each must be available.",
)


@bench.command(name="sampler", context_settings=CONTEXT)
@click.option("--vocab", type=click.IntRange(min=1), default=151_936, show_default=True, help="Vocabulary size.")
@click.option("--hidden", type=click.IntRange(min=1), default=2048, show_default=True, help="Embedding size.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences per step.")
@click.option(
    "--regime",
    type=_CommaSeparated(click.Choice(("certified", "flat", "uncertified")), name="regimes"),
    default="certified",
    show_default=True,
    help="Kind of logits: the kept set is certified among few candidates (certified), among many (flat), or decided by "
    "distances (uncertified). Comma-separated.",
)
@click.option(
    "--temperature",
    type=_CommaSeparated(click.FLOAT, name="temperatures"),
    help="Sampling temperature; default: the regime's own. Comma-separated.",
)
@click.option(
    "--metric", type=click.Choice(METRICS), default="mahalanobis", show_default=True, help="Distance between tokens."
)
@click.option(
    "--alt-iters", type=click.IntRange(min=1), default=3, show_default=True, help="Maximum number of alternations."
)
@click.option("--geom-scale", type=float, default=1.0, show_default=True, help="Factor on the distances.")
@click.option("--neighbour-bound", is_flag=True, help="Compute the neighbour bound first, for the tokens of the pool.")
@click.option("--logits", type=_EXISTING_FILE, help="Sample from the logits in this .npy file, [V] or [B, V].")
@_peers_option
@click.option("--authors", type=_EXISTING_FILE, help="Also time this copy of the authors' logit_processor_w1.py.")
@click.option(
    "--genai-python", type=_EXISTING_FILE, metavar="PYTHON", help="Python of an environment with onnxruntime-genai."
)
@_common_options(
    click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads of each side."),
    40,
)
def sampler(
    regime: tuple[str, ...],
    temperature: tuple[float, ...] | None,
    metric: str,
    alt_iters: int,
    peers: tuple[str, ...] | None,
    json_file: Path | None,
    plot: Path | None,
    quiet: bool,
    **rest: Any,
) -> None:
    """Time one sampling step of Top-W and of every other installed sampler on the same logits.

    Before timing, every implementation of Top-W must keep the same tokens as the reference.
    """
    _check_outputs(json_file, plot)
    from topw_lab.bench.sampler import run

    options = TopWOptions(metric=metric, alt_iters=alt_iters)
    report = run(
        regimes=regime,
        temperatures=temperature or (),
        options=options,
        peers=peers or (),
        progress=progress(quiet),
        **rest,
    )
    _show_report(report, json_file, plot)


@bench.command(name="decode", context_settings=CONTEXT)
@click.argument("folder", metavar="OUT", type=_EXISTING_FOLDER)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of the random prompt."
)
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens to generate.")
@click.option(
    "--transformers", metavar="MODEL_DIR", type=_EXISTING_FOLDER, help="The model that OUT was exported from."
)
@click.option("--optimum", metavar="FOLDER", type=_EXISTING_FOLDER, help="The same model, exported by optimum.")
@click.option(
    "--optimum-python", metavar="PYTHON", type=_EXISTING_FILE, help="Python of an environment with optimum-onnx."
)
@click.option(
    "--genai", metavar="FOLDER", type=_EXISTING_FOLDER, help="The same model, from onnxruntime-genai's builder."
)
@click.option(
    "--genai-python", metavar="PYTHON", type=_EXISTING_FILE, help="Python of an environment with onnxruntime-genai."
)
@click.option(
    "--authors", type=_EXISTING_FILE, help="Also time this copy of the authors' logit_processor_w1.py in transformers."
)
@_peers_option
@_common_options(_threads_option("each side"), 9)
def decode(
    peers: tuple[str, ...] | None,
    json_file: Path | None,
    plot: Path | None,
    quiet: bool,
    **rest: Any,
) -> None:
    """Time the decoding loop of the exported model in the folder OUT and of other libraries with the same weights.

    Each side loads the model once, in its own process; then the sides take turns.
    """
    _check_outputs(json_file, plot)
    from topw_lab.bench.decode import run

    _show_report(run(peers=peers or (), progress=progress(quiet), **rest), json_file, plot)


@bench.command(name="serve", context_settings=CONTEXT)
@click.argument("folder", metavar="OUT", type=_EXISTING_FOLDER)
@click.option(
    "--concurrency",
    type=_CommaSeparated(click.IntRange(min=1), name="numbers of callers"),
    default="1,4,16,64",
    show_default=True,
    help="Number of callers; each sends its next request when it has the answer. Comma-separated: one run per value.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Minimum number of requests per round; there is at least one per caller.",
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Mean length of prompts; default: 342, or what fits.")
@click.option("--new-tokens", type=click.IntRange(min=2), help="Mean number of new tokens; default: 62, or what fits.")
@click.option(
    "--rows", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences that the engine runs at once."
)
@click.option(
    "--prefill-budget",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum number of prompt tokens that the engine reads at once.",
)
@click.option(
    "--peers",
    type=_CommaSeparated(click.STRING, name="sides"),
    help="Run only these of engine, one-by-one, static and ideal, separated by commas.",
)
@_common_options(_threads_option("the session"), 3)
def serve(peers: tuple[str, ...] | None, json_file: Path | None, plot: Path | None, quiet: bool, **rest: Any) -> None:
    """Time requests of many callers to the exported model in the folder OUT: through the engine, by `generate` one by
    one and in batches, and the engine's runs alone.

    Lengths have a log-normal distribution. The command also measures the engine's overhead, and the time to the first
    text while a long prompt is read and after a reused prefix.
    """
    _check_outputs(json_file, plot)
    from topw_lab.bench.serve import run

    _show_report(run(peers=peers or (), progress=progress(quiet), **rest), json_file, plot)


@bench.command(name="rules", context_settings=CONTEXT)
@click.argument("folders", metavar="OUT...", nargs=-1, required=True, type=_EXISTING_FOLDER)
@click.option(
    "--rules",
    metavar="RULE[=VALUE],...",
    default="top_k=50,top_p=0.9,min_p=0.1,top_h=0.4,top_w",
    show_default=True,
    help="Rules and their values, as for `topw compare`; top_w and at least one other.",
)
@click.option("--temperatures", metavar="T1,T2,...", default="0.5,1,1.5,2", show_default=True, help="Temperatures.")
@click.option(
    "--samplers",
    type=_CommaSeparated(click.Choice(("native", "graph")), name="samplers"),
    help="How to open each model: with the native operator, with the function in its graph, or (default) both, one "
    "after the other. Comma-separated.",
)
@click.option("--prompt", metavar="TEXT", help="Continue this text.  [default: random tokens]")
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of the random prompt."
)
@click.option(
    "--max-new-tokens",
    "--new-tokens",
    "new_tokens",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Tokens to generate; EOS is ignored.",
)
@_common_options(_threads_option("the session"), 20)
def bench_rules(
    rules: str,
    temperatures: str,
    samplers: tuple[str, ...] | None,
    json_file: Path | None,
    plot: Path | None,
    quiet: bool,
    **rest: Any,
) -> None:
    """Time a token of the exported models in the folders OUT under every sampling rule and temperature, and the
    overhead of Top-W against the mean of the other rules.

    The rules share one process and session per model. A round visits every rule and temperature once, in random order.
    The shares of certified tokens explain differences.
    """
    _check_outputs(json_file, plot)
    from topw_deploy.runtime.rule_settings import read_rules, read_temperatures
    from topw_lab.bench.rules import run

    report = run(
        rules=read_rules(rules),
        temperatures=read_temperatures(temperatures),
        samplers=samplers or (),
        progress=progress(quiet),
        **rest,
    )
    _show_report(report, json_file, plot)


def _check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Raises ParameterError, before anything is timed, for files that cannot be written."""
    check_output(json_file, "json_file")
    check_picture(plot, (".png",))


def _show_report(report: Report, json_file: Path | None, plot: Path | None) -> None:
    """Print the report, write it as JSON, and draw it."""
    write_report(report.text().split("\n"), report.as_dict(), json_file)
    if plot is not None:
        report.draw(plot)

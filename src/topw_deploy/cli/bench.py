"""`topw bench`: the measurements, and how their results are shown."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from topw_deploy.cli.flags import suggestion
from topw_deploy.cli.options import CONTEXT
from topw_deploy.cli.outputs import check_output, check_picture
from topw_deploy.cli.terminal import say, say_json, tell
from topw_deploy.sampling.parameters import METRICS, TopWOptions

if TYPE_CHECKING:
    from topw_deploy.bench.decode.report import DecodeReport
    from topw_deploy.bench.progress import Progress
    from topw_deploy.bench.sampler.report import SamplerReport

Item = TypeVar("Item")
Command = TypeVar("Command", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


class _Several(click.ParamType, Generic[Item]):
    """Values of one kind, with commas between them: 1,2."""

    def __init__(self, kind: type[Item], *, name: str, choices: Sequence[Item] = ()) -> None:
        self.name, self._kind, self._choices = name, kind, choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Item, ...]:
        if isinstance(value, tuple):
            return value
        try:
            items = tuple(self._kind(part) for part in str(value).replace(",", " ").split())  # type: ignore[call-arg]
        except ValueError:
            self.fail(f"{value!r} is not a list of {self.name} with commas between them.", param, ctx)
        for item in items:
            if self._choices and item not in self._choices:
                known = [str(choice) for choice in self._choices]
                self.fail(f"{item!r} is not one of {', '.join(known)}.{suggestion(str(item), known)}", param, ctx)
        if not items:
            self.fail(f"it is empty, but must hold {self.name}.", param, ctx)
        return items


@click.group(name="bench", context_settings=CONTEXT)
def command() -> None:
    """Measure on this machine: a sampling step, or a whole decoding loop, beside others.

    All sides take turns, so that a machine that drifts slows them alike; ratios are taken round by round.
    """


def _common(threads: Any, rounds: int) -> Callable[[Command], Command]:
    """The options of both commands. threads: the one whose meaning differs; rounds: the default."""
    options = (
        threads,
        click.option(
            "--rounds", type=click.IntRange(min=1), default=rounds, show_default=True, help="Turns of every side."
        ),
        click.option(
            "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order and the data."
        ),
        click.option("--json", "json_file", metavar="FILE", help="Write everything as JSON; - is standard output."),
        click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the result as a PNG."),
        click.option("-q", "--quiet", is_flag=True, help="No progress on stderr."),
    )

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@command.command(name="sampler", context_settings=CONTEXT)
@click.option("--vocab", type=click.IntRange(min=1), default=151_936, show_default=True, help="Tokens.")
@click.option("--hidden", type=click.IntRange(min=1), default=2048, show_default=True, help="Width of the embeddings.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows of a step.")
@click.option(
    "--regime",
    type=_Several(str, name="regimes", choices=("certified", "flat", "uncertified")),
    default="certified",
    show_default=True,
    help="Shape of the logits: settled among few candidates, among many, or by distances. Several with commas.",
)
@click.option("--temperature", type=_Several(float, name="temperatures"), help="Several with commas.")
@click.option("--metric", type=click.Choice(METRICS), default="mahalanobis", show_default=True, help="Token distance.")
@click.option("--alt-iters", type=click.IntRange(min=1), default=3, show_default=True, help="Most alternations.")
@click.option("--geom-scale", type=float, default=1.0, show_default=True, help="Factor on distances.")
@click.option("--neighbour-bound", is_flag=True, help="Measure the neighbour bound first, for the pool's tokens.")
@click.option("--logits", type=_FILE, help="A .npy file [V] or [B, V] to sample from.")
@click.option("--peers", type=_Several(str, name="sides"), help="Only these sides, with commas; all must be there.")
@click.option("--authors", type=_FILE, help="The authors' logit_processor_w1.py, to run beside ours.")
@click.option(
    "--genai-python", type=_FILE, metavar="PYTHON", help="Interpreter of an environment with onnxruntime-genai."
)
@_common(
    click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="For every side."), 40
)
def sampler(
    regime: tuple[str, ...],
    temperature: tuple[float, ...] | None,
    metric: str,
    alt_iters: int,
    peers: tuple[str, ...] | None,
    json_file: str | None,
    plot: Path | None,
    quiet: bool,
    **rest: Any,
) -> None:
    """Time one sampling step: ours, and every other sampler that is here, over the same logits.

    Before anything is timed, all implementations of Top-W must keep the tokens that the definition keeps.
    """
    _check_outputs(json_file, plot)
    from topw_deploy.bench.sampler.run import run
    from topw_deploy.bench.sampler.settings import SamplerSettings

    settings = SamplerSettings(
        regimes=regime,
        temperatures=temperature or (),
        options=TopWOptions(metric=metric, alt_iters=alt_iters),
        peers=peers or (),
        **rest,
    )
    _show(run(settings, _progress(quiet)), json_file, plot, "one step, logarithmic")


@command.command(name="decode", context_settings=CONTEXT)
@click.argument("folder", metavar="OUT", type=_FOLDER)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of a made-up prompt."
)
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens to generate.")
@click.option("--transformers", metavar="MODEL_DIR", type=_FOLDER, help="The model OUT was made from.")
@click.option("--optimum", metavar="FOLDER", type=_FOLDER, help="The same model as optimum exported it.")
@click.option("--optimum-python", metavar="PYTHON", type=_FILE, help="Interpreter of optimum's environment.")
@click.option("--genai", metavar="FOLDER", type=_FOLDER, help="The same model from onnxruntime-genai's builder.")
@click.option("--genai-python", metavar="PYTHON", type=_FILE, help="Interpreter of onnxruntime-genai's environment.")
@click.option("--authors", type=_FILE, help="The authors' logit_processor_w1.py, to run in transformers.")
@click.option("--peers", type=_Several(str, name="sides"), help="Only these sides, with commas; all must be there.")
@_common(
    click.option(
        "--threads",
        type=_Several(int, name="thread counts"),
        default="1",
        show_default=True,
        help="For every side. Several with commas: one run after the other.",
    ),
    9,
)
def decode(
    peers: tuple[str, ...] | None,
    json_file: str | None,
    plot: Path | None,
    quiet: bool,
    **rest: Any,
) -> None:
    """Time the decoding loop of the exported folder OUT, beside other libraries on the same weights.

    Every side is a process of its own that loads once; then all take turns.
    """
    _check_outputs(json_file, plot)
    from topw_deploy.bench.decode.run import run
    from topw_deploy.bench.decode.settings import DecodeSettings

    settings = DecodeSettings(peers=peers or (), **rest)
    _show(run(settings, _progress(quiet)), json_file, plot, "one token after the first, logarithmic")


def _check_outputs(json_file: str | None, plot: Path | None) -> None:
    check_output(None if json_file is None else Path(json_file), "json_file")
    check_picture(plot, (".png",))


def _show(report: SamplerReport | DecodeReport, json_file: str | None, plot: Path | None, axis: str) -> None:
    """The table on stdout, unless JSON goes there; then the files."""
    from topw_deploy.bench.picture import draw
    from topw_deploy.bench.report import write_json

    if json_file != "-":
        say(*report.text().split("\n"))
    if json_file == "-":
        say_json(report.as_dict(), indent=2)
    elif json_file is not None:
        write_json(report.as_dict(), json_file)
    if plot is not None:
        draw(plot, report.panels(), axis, f"Medians, whiskers are quartiles. {report.machine}.")


def _progress(quiet: bool) -> Progress:
    from topw_deploy.bench.progress import Progress, no_progress

    if quiet:
        return no_progress
    return Progress(tell, _bar)


@contextlib.contextmanager
def _bar(total: int, unit: str) -> Iterator[Callable[[], object]]:
    """A bar on stderr; none where tqdm is not installed, which only exporting needs."""
    if importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    from topw_deploy.cli.progress import bar

    with bar(total, unit) as update:
        yield lambda: update(1)

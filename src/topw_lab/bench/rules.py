"""`topw bench rules`: a token of each model under every sampling rule and temperature, and Top-W's overhead.

Measured: seconds per token after the first one, share of certified tokens and mean size of the kept sets. All rules
share one process and session per model. This file is also the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median
from textwrap import fill
from typing import Any

import numpy as np

from topw_deploy.errors import BenchmarkError, ParameterError, PromptError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.rules import TOP_W
from topw_deploy.text import count_text, printable
from topw_lab.bench.measure import Spread, interleave, this_machine
from topw_lab.bench.sides import (
    MIN_P,
    TOP_K,
    TOP_P,
    Report,
    Side,
    choose,
    decoder_manifest,
    random_prompt,
    require_context,
    why_no_native_library,
)
from topw_lab.plots import COLOURS, MUTED, TEXT, new_figure, save_figure, style_axes, write_title
from topw_lab.tables import table
from topw_lab.worker import Worker

DEFAULT_RULES = f"top_k={TOP_K},top_p={TOP_P},min_p={MIN_P},top_h=0.4,top_w"
DEFAULT_TEMPERATURES = "0.5,1,1.5,2"  # from the range in the paper's second version, which also has 0.7
PROMPT_TOKENS = 128
"""Default length of the random prompt."""

_WARMUP_ROUNDS = 1
_RESAMPLES = 2000
_AXIS = "time per token relative to the mean of the rules other than Top-W"
_PANEL_WIDTH, _NAMES_WIDTH, _LEAST_WIDTH = 2.6, 1.4, 8.0  # inches: of a panel, of the rules' names, of the figure
_ROW_HEIGHT, _TITLE_HEIGHT, _NOTE_HEIGHT = 0.34, 1.4, 0.9  # inches: of a rule, of the title, of axis label and note
_LEAST_RANGE = 0.01  # the axis goes at least this far to both sides, as a share of the mean
_CHARACTERS_PER_INCH = 7  # of a title
_TEXT_SHARE = 0.54  # share of a panel's width for the text right of the marks


@dataclass(frozen=True, kw_only=True)
class RulesRequest:
    """Options of `topw bench rules`.

    folders: exported models; each is measured with every sampler and thread count.
    rules: Top-W once, and at least one other rule.
    temperatures: without duplicates.
    samplers: "native" (the operator) and "graph" (the function in the file); empty for all that are available.
    prompt: the text to continue; None for a random prompt.
    prompt_tokens: length of the random prompt. None: PROMPT_TOKENS.
    new_tokens: number of tokens of a generation, at least 2, which does not end at EOS.
    threads: thread counts.
    rounds: number of generations per rule and temperature.
    seed: of the prompt, of the order and of the draws.
    """

    folders: Sequence[Path]
    rules: Sequence[RuleSetting]
    temperatures: Sequence[float]
    samplers: Sequence[str] = ()
    prompt: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int = 64
    threads: Sequence[int] = (1,)
    rounds: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Overhead:
    """The extra time of one rule, as a share of the time of other rules.

    value: overhead of the medians over rounds.
    interval: 95 % bootstrap interval of `value`. Whole rounds are resampled, as noise affects all times of a round.
    rounds: overhead of each round.
    """

    value: float
    interval: tuple[float, float]
    rounds: Sequence[float]

    @classmethod
    def of(cls, ours: np.ndarray, others: np.ndarray) -> Overhead:
        """mean(ours) / mean(others) - 1.

        ours, others: seconds, [cells, rounds], with a cell per rule and temperature.
        """

        def of_medians(a: np.ndarray, b: np.ndarray) -> Any:
            """[cells, ..., rounds] -> [...]"""
            return np.median(a, -1).mean(0) / np.median(b, -1).mean(0) - 1

        rounds = ours.shape[1]
        resampled = np.random.default_rng(0).integers(rounds, size=(_RESAMPLES, rounds))
        low, high = np.quantile(of_medians(ours[:, resampled], others[:, resampled]), [0.025, 0.975])
        return cls(
            float(of_medians(ours, others)),
            (float(low), float(high)),
            (ours.mean(0) / others.mean(0) - 1).tolist(),
        )

    def __str__(self) -> str:
        low, high = self.interval
        return f"{_percent(self.value)} ({low * 100:+.1f} to {high * 100:+.1f})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "quartiles": asdict(Spread.of(self.rounds))}


@dataclass(frozen=True)
class ModelTimes:
    """The times of one model with one sampler and thread count.

    title: folder, sampler and threads.
    top_w: the label of Top-W.
    cells: for each rule and temperature, the worker's result of each round.
    """

    title: str
    top_w: str
    cells: Mapping[tuple[str, float], Sequence[Mapping[str, float]]]

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(rule for rule, _ in self.cells))

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(temperature for _, temperature in self.cells))

    @property
    def other_rules(self) -> list[str]:
        return [rule for rule in self.rules if rule != self.top_w]

    @property
    def fastest_rule(self) -> str:
        """The rule other than Top-W with the lowest mean, over temperatures, of the median times."""
        return min(self.other_rules, key=lambda rule: fmean(median(self.seconds(rule, t)) for t in self.temperatures))

    def seconds(self, rule: str, temperature: float) -> list[float]:
        """Seconds per token after the first one, by round."""
        return [run["seconds"] for run in self.cells[rule, temperature]]

    def overhead(
        self, temperature: float | None = None, *, rule: str | None = None, to_fastest: bool = False
    ) -> Overhead:
        """The overhead of a rule to the mean of the rules other than Top-W: mean(rule) / mean(other rules) - 1.

        temperature: None for the mean of all temperatures.
        rule: None for Top-W.
        to_fastest: compare with the fastest of the other rules instead of their mean.
        """
        temperatures = self.temperatures if temperature is None else [temperature]

        def times(rules: Sequence[str]) -> np.ndarray:
            return np.array([self.seconds(name, at) for name in rules for at in temperatures])

        return Overhead.of(times([rule or self.top_w]), times([self.fastest_rule] if to_fastest else self.other_rules))

    def cell_text(self, rule: str, temperature: float) -> str:
        """Milliseconds per token and the share of certified tokens."""
        certified = fmean(run["certified"] for run in self.cells[rule, temperature])
        return f"{Spread.of(self.seconds(rule, temperature)).format(1e3, 3)}, {certified:.0%}"

    def overhead_row(self) -> tuple[str, ...]:
        """The model's row in the table of overheads."""
        overheads = (self.overhead(temperature) for temperature in (*self.temperatures, None))
        return (self.title, *map(str, overheads), f"{self.overhead(to_fastest=True)} {self.fastest_rule}")

    def as_dict(self) -> dict[str, Any]:
        overheads = {f"{temperature:g}": self.overhead(temperature).as_dict() for temperature in self.temperatures}
        return {
            "cells": [
                {
                    "rule": rule,
                    "temperature": temperature,
                    "seconds": self.seconds(rule, temperature),
                    "seconds_per_token": asdict(Spread.of(self.seconds(rule, temperature))),
                    "certified_share": fmean(run["certified"] for run in runs),
                    "kept": fmean(run["kept"] for run in runs),
                }
                for (rule, temperature), runs in self.cells.items()
            ],
            "overhead": {**overheads, "all": self.overhead().as_dict()},
            "overhead_to_fastest": {"rule": self.fastest_rule, **self.overhead(to_fastest=True).as_dict()},
        }


def run(request: RulesRequest, progress: Progress = SILENT) -> Report:
    """Measure one model after the other, each in a process of its own.

    A round calls every rule at every temperature once, in random order.

    Raises ManifestError for a folder without a decoder, ParameterError for rules without a comparison and for a prompt
    that does not fit, BenchmarkError for a named sampler that is not available, and errors of running the models.
    """
    top_w = [rule.label for rule in request.rules if rule.parameters["rule"] == TOP_W.name]
    if len(top_w) != 1 or len(request.rules) < 2:
        raise ParameterError(
            f"rules is {', '.join(rule.label for rule in request.rules)}, but must have top_w once, and at least one "
            "other to compare it with.",
            "rules",
        )
    every = [
        Side(name="native", label="native", kind="ours", settings={}, why_not=why_no_native_library()),
        Side(name="graph", label="graph", kind="ours", settings={}),
    ]
    present, absent = choose(every, request.samplers)
    prompts = {folder: _prompt_ids(request, folder) for folder in dict.fromkeys(request.folders)}
    machine = this_machine()
    models, results = [], []
    cells = len(request.rules) * len(request.temperatures)
    total = len(prompts) * len(present) * len(request.threads) * cells * (request.rounds + _WARMUP_ROUNDS)
    with progress.bar(total, "generation") as advance:
        for folder, prompt in prompts.items():
            for sampler in (side.name for side in present):
                for threads in request.threads:
                    title = f"{folder}, {sampler}, {count_text(threads, 'thread')}"
                    progress.say(f"Loading {title}")
                    settings = {"folder": str(folder), "sampler": sampler, "threads": threads, "prompt": prompt}
                    models.append(ModelTimes(title, top_w[0], _measure(request, settings, advance)))
                    head = {"folder": str(folder), "sampler": sampler, "threads": threads, "prompt_tokens": len(prompt)}
                    results.append({**head, **models[-1].as_dict()})
    lengths = " or ".join(str(length) for length in sorted({len(prompt) for prompt in prompts.values()}))
    temperatures = [f"T = {temperature:g}" for temperature in request.temperatures]
    lines = [f"{machine}; {lengths} + {request.new_tokens} tokens, {count_text(request.rounds, 'round')}"]
    for model in models:
        lines.append(f"\n{model.title}: ms/token (quartiles), certified tokens\n")
        rows = [(rule, *(model.cell_text(rule, at) for at in model.temperatures)) for rule in model.rules]
        lines.append(table(("rule", *temperatures), rows))
    compared = "the mean of the other rules" if len(request.rules) > 2 else models[0].fastest_rule
    lines.append(f"\nOverhead of {top_w[0]} to {compared} (95 % interval over rounds)\n")
    header = ("model", *temperatures, "all", "all, to the fastest")
    lines.append(table(header, [model.overhead_row() for model in models]))
    note = f"Medians of {request.rounds} rounds; whiskers are 95 % intervals. {machine}."
    return Report(
        benchmark="rules",
        request=request,
        machine=machine,
        lines=lines,
        results={"models": results},
        draw=lambda path: draw(path, models, note),
        absent=absent,
    )


def _prompt_ids(request: RulesRequest, folder: Path) -> list[int]:
    """The token ids of the prompt for the model in `folder`."""
    if request.prompt is None:
        return random_prompt(folder, request.prompt_tokens or PROMPT_TOKENS, request.new_tokens, request.seed)
    manifest = decoder_manifest(folder)
    ids = Tokenizer(ModelFolder(folder, DecoderManifest)).encode(request.prompt)
    if not ids:
        raise PromptError("the prompt has no tokens; give some text.", "prompt")
    require_context(manifest, len(ids), request.new_tokens, "prompt")
    return ids


def _measure(
    request: RulesRequest, settings: dict[str, Any], advance: Advance
) -> dict[tuple[str, float], list[Mapping[str, float]]]:
    """The worker's results of each rule and temperature. The n-th generation of all of them has the seed `seed` + n."""
    settings = {**settings, "new_tokens": request.new_tokens}
    with Worker(settings["folder"], __file__, settings, threads=settings["threads"]) as worker:

        def generate(parameters: Mapping[str, Any], seeds: Any) -> Mapping[str, float]:
            result: Mapping[str, float] = worker.call("run", parameters=parameters, seed=next(seeds))
            return result

        places = {
            f"{rule.label} at {temperature!r}": (rule, temperature)
            for temperature in request.temperatures
            for rule in request.rules
        }
        calls = {
            name: partial(generate, {**rule.parameters, "temperature": temperature}, count(request.seed))
            for name, (rule, temperature) in places.items()
        }
        samples = interleave(calls, request.rounds, _WARMUP_ROUNDS, seed=request.seed, advance=advance)
    return {(rule.label, temperature): samples[name] for name, (rule, temperature) in places.items()}


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Open the model. Returns `run`.

    settings: "folder" (the exported model), "sampler" ("native" or "graph"), "threads", "prompt" (ids), "new_tokens".
    """
    from topw_deploy.runtime import TopWModel

    model = TopWModel.from_pretrained(
        settings["folder"], provider="cpu", sampler=settings["sampler"], intra_op_num_threads=settings["threads"]
    )
    new_tokens = settings["new_tokens"]

    def run(parameters: dict[str, Any], seed: int) -> dict[str, float]:
        result = model.generate(settings["prompt"], max_new_tokens=new_tokens, seed=seed, ignore_eos=True, **parameters)
        drawn = len(result.token_ids)
        if drawn < new_tokens:  # a rule with fewer tokens would attend to a shorter context
            raise BenchmarkError(
                f"{settings['folder']} ended after {drawn} of {new_tokens} tokens ({result.finish_reason}); remove the "
                "stopping parameters from its generation_config.json."
            )
        return {
            "seconds": result.timings.seconds_per_token,
            "certified": result.certified_share,
            "kept": sum(result.kept) / drawn,
        }

    return {"run": run}


def _percent(share: float) -> str:
    """A share in per cent with its sign: 0.0042 as "+0.4 %"."""
    return f"{share * 100:+.1f} %"


def draw(path: Path, models: Sequence[ModelTimes], note: str) -> None:
    """Draw a row of panels per model, with one panel per temperature.

    A mark shows the time relative to the mean of the rules other than Top-W: in bars, a difference of one per cent
    would be invisible.
    """
    temperatures = models[0].temperatures
    heights = [_TITLE_HEIGHT + _ROW_HEIGHT * len(model.rules) for model in models]
    width = max(_LEAST_WIDTH, _NAMES_WIDTH + _PANEL_WIDTH * len(temperatures))
    figure = new_figure(width, sum(heights) + _NOTE_HEIGHT)
    parts = figure.subfigures(len(models), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, model in zip(parts, models, strict=True):
        marks = {(rule, t): model.overhead(t, rule=rule) for t in temperatures for rule in model.rules}
        low = min(-_LEAST_RANGE, *(min(mark.value, mark.interval[0]) for mark in marks.values())) * 110
        high = max(_LEAST_RANGE, *(max(mark.value, mark.interval[1]) for mark in marks.values())) * 110
        axes = part.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for ax, temperature in zip(axes, temperatures, strict=True):
            _draw_panel(ax, model, temperature, marks, (low, high))
        mean, fastest = (_difference(model.overhead(to_fastest=fastest).value) for fastest in (False, True))
        title = f"Top-W takes {mean} than the mean of the other rules, {fastest} than {model.fastest_rule}"
        write_title(part, fill(f"{printable(model.title)}: {title}", round(_CHARACTERS_PER_INCH * width)))
    parts[-1].supxlabel(_AXIS, color=MUTED, fontsize=9)
    save_figure(figure, path, note)


def _difference(share: float) -> str:
    """A share as a difference in words: 0.0042 as "0.4 % more"."""
    return f"{_percent(abs(share)).lstrip('+')} {'less' if share < 0 else 'more'}"


def _draw_panel(
    ax: Any,
    model: ModelTimes,
    temperature: float,
    marks: Mapping[tuple[str, float], Overhead],
    ends: tuple[float, float],
) -> None:
    """ends: of the range of the marks, in per cent."""
    from matplotlib.ticker import MaxNLocator

    style_axes(ax, grid="x", spines=())
    ax.axvline(0, color=MUTED, linewidth=0.8, zorder=1)
    for place, rule in enumerate(reversed(model.rules)):
        mark, is_top_w = marks[rule, temperature], rule == model.top_w
        colour = COLOURS[0] if is_top_w else TEXT
        whiskers = [[max(0.0, mark.value - mark.interval[0]) * 100], [max(0.0, mark.interval[1] - mark.value) * 100]]
        ax.errorbar(
            mark.value * 100, place, xerr=whiskers, fmt="o", color=colour, markersize=5, elinewidth=1, capsize=2.5
        )
        ax.annotate(
            f"{median(model.seconds(rule, temperature)) * 1e3:.2f} ms  {_percent(mark.value)}",
            (1, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=8,
            color=colour,
            fontweight="bold" if is_top_w else "normal",
        )
    low, high = ends
    ax.set_xlim(low, high + (high - low) * _TEXT_SHARE / (1 - _TEXT_SHARE))
    ax.set_xticks([tick for tick in MaxNLocator(3).tick_values(low, high) if low <= tick <= high])
    ax.set_ylim(-0.6, len(model.rules) - 0.4)
    ax.set_yticks(range(len(model.rules)), model.rules[::-1], fontsize=9.5, color=TEXT)
    ax.set_title(f"T = {temperature:g}", fontsize=9, color=MUTED, loc="left")
    ax.xaxis.set_major_formatter(lambda value, _position: f"{value:+g} %" if value else "0")
    ax.tick_params(length=0)

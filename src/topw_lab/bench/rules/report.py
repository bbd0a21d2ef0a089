"""The report of `topw bench rules`: times by rule and temperature, and the overhead of Top-W."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

import numpy as np

from topw_deploy.reports import count_text
from topw_lab.bench.measurement import Spread
from topw_lab.bench.report import BenchReport, table
from topw_lab.bench.rules.request import RulesRequest

ALL_TEMPERATURES = "all"
"""Key in the JSON report of the overhead over all temperatures."""

_RESAMPLES = 2000


@dataclass(frozen=True)
class RuleTimes:
    """The times of one rule at one temperature.

    runs: the worker's result of each round; see worker.py.
    """

    rule: str
    temperature: float
    runs: Sequence[Mapping[str, float]]

    @property
    def seconds(self) -> list[float]:
        """Seconds per token after the first one, by round."""
        return [run["seconds"] for run in self.runs]

    @property
    def certified_share(self) -> float:
        """Share of certified tokens, over all rounds."""
        return fmean(run["certified"] for run in self.runs)

    @property
    def mean_kept(self) -> float:
        """Mean size of the crops, over all rounds."""
        return fmean(run["kept"] for run in self.runs)

    def format(self) -> str:
        """Milliseconds per token and the share of certified tokens, for a table."""
        return f"{Spread.of(self.seconds).format(1e3, 3)}, {self.certified_share:.0%}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "temperature": self.temperature,
            "seconds": self.seconds,
            "seconds_per_token": asdict(Spread.of(self.seconds)),
            "certified_share": self.certified_share,
            "kept": self.mean_kept,
        }


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
        count = ours.shape[1]
        resampled = np.random.default_rng(0).integers(count, size=(_RESAMPLES, count))
        low, high = np.quantile(_overhead_of_medians(ours[:, resampled], others[:, resampled]), [0.025, 0.975])
        rounds = ours.mean(0) / others.mean(0) - 1
        return cls(float(_overhead_of_medians(ours, others)), (float(low), float(high)), rounds.tolist())

    def format(self) -> str:
        """Value and interval, for a table."""
        low, high = self.interval
        return f"{percent(self.value)} ({low * 100:+.1f} to {high * 100:+.1f})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "quartiles": asdict(Spread.of(self.rounds))}


def _overhead_of_medians(ours: np.ndarray, others: np.ndarray) -> Any:
    """The overhead of the medians over the last axis: [cells, ..., rounds] -> [...]."""
    return np.median(ours, -1).mean(0) / np.median(others, -1).mean(0) - 1


@dataclass(frozen=True)
class ModelReport:
    """The times of one model with one sampler and thread count.

    sampler: "native" or "graph".
    prompt_tokens: length of the prompt.
    top_w: the label of Top-W.
    cells: times of every rule at every temperature, in the order of the request.
    """

    folder: Path
    sampler: str
    threads: int
    prompt_tokens: int
    top_w: str
    cells: Sequence[RuleTimes]

    @property
    def title(self) -> str:
        return f"{self.folder}, {self.sampler}, {count_text(self.threads, 'thread')}"

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(cell.temperature for cell in self.cells))

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(cell.rule for cell in self.cells))

    @property
    def other_rules(self) -> list[str]:
        """The labels of all rules other than Top-W."""
        return [rule for rule in self.rules if rule != self.top_w]

    @property
    def fastest_rule(self) -> str:
        """The label of the rule other than Top-W with the lowest mean, over temperatures, of the median times."""
        return min(
            self.other_rules, key=lambda rule: fmean(median(self.cell(rule, t).seconds) for t in self.temperatures)
        )

    def cell(self, rule: str, temperature: float) -> RuleTimes:
        return next(cell for cell in self.cells if (cell.rule, cell.temperature) == (rule, temperature))

    def overhead(
        self, temperature: float | None = None, *, rule: str | None = None, to_fastest: bool = False
    ) -> Overhead:
        """The overhead of a rule to the mean of the rules other than Top-W: mean(rule) / mean(other rules) - 1.

        temperature: None for the mean of all temperatures.
        rule: label; None for Top-W.
        to_fastest: compare with the fastest of the other rules instead of their mean.
        """
        temperatures = self.temperatures if temperature is None else [temperature]

        def times(rules: Sequence[str]) -> np.ndarray:
            return np.array([self.cell(name, at).seconds for name in rules for at in temperatures])

        return Overhead.of(times([rule or self.top_w]), times([self.fastest_rule] if to_fastest else self.other_rules))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The rows of the model's table of times."""
        for rule in self.rules:
            yield (rule, *(self.cell(rule, temperature).format() for temperature in self.temperatures))

    def overhead_cells(self) -> tuple[str, ...]:
        """The cells of the model's row in the table of overheads."""
        each = (self.overhead(temperature).format() for temperature in self.temperatures)
        return (*each, self.overhead().format(), f"{self.overhead(to_fastest=True).format()} {self.fastest_rule}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "sampler": self.sampler,
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "cells": [cell.as_dict() for cell in self.cells],
            "overhead": {
                **{f"{temperature:g}": self.overhead(temperature).as_dict() for temperature in self.temperatures},
                ALL_TEMPERATURES: self.overhead().as_dict(),
            },
            "overhead_to_fastest": {"rule": self.fastest_rule, **self.overhead(to_fastest=True).as_dict()},
        }


@dataclass(frozen=True, kw_only=True)
class RulesReport(BenchReport):
    """The report: one part per model, sampler and thread count."""

    benchmark: ClassVar[str] = "rules"

    request: RulesRequest
    models: Sequence[ModelReport]

    def lines(self) -> list[str]:
        request = self.request
        prompts = sorted({model.prompt_tokens for model in self.models})
        tokens = f"{' or '.join(map(str, prompts))} + {request.new_tokens} tokens"
        lines = [f"{self.machine}; {tokens}, {count_text(request.rounds, 'round')}"]
        temperatures = [f"T = {temperature:g}" for temperature in request.temperatures]
        for model in self.models:
            lines.append(f"\n{model.title}: ms/token (quartiles), certified tokens\n")
            lines.append(table(("rule", *temperatures), model.rows()))
        compared = "the mean of the other rules" if len(request.rules) > 2 else self.models[0].other_rules[0]
        lines.append(f"\nOverhead of {request.top_w_label} to {compared} (95 % interval over rounds)\n")
        header = ("model", *temperatures, "all", "all, to the fastest")
        lines.append(table(header, [(model.title, *model.overhead_cells()) for model in self.models]))
        return lines

    def results(self) -> dict[str, Any]:
        return {"models": [model.as_dict() for model in self.models]}


def percent(share: float) -> str:
    """A share in per cent with its sign: 0.0042 as "+0.4 %"."""
    return f"{share * 100:+.1f} %"

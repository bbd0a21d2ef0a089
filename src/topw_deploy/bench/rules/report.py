"""Report of `topw bench rules`: times by rule and temperature, and the overhead of Top-W."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from topw_deploy.bench.measurement import Machine, Spread
from topw_deploy.bench.report import closing_lines, request_json, table
from topw_deploy.bench.rules.request import RulesRequest
from topw_deploy.reports import counted

ALL = "all"
_RESAMPLED = 2000


@dataclass(frozen=True)
class Cell:
    """A rule at a temperature.

    runs: what the worker returned, by round; see worker.py.
    """

    rule: str
    temperature: float
    runs: Sequence[Mapping[str, float]]

    @property
    def seconds(self) -> list[float]:
        """Per token after the first, by round."""
        return [run["seconds"] for run in self.runs]

    @property
    def certified(self) -> float:
        """Share of certified tokens over all rounds."""
        return fmean(run["certified"] for run in self.runs)

    @property
    def kept(self) -> float:
        """Mean crop size over all rounds."""
        return fmean(run["kept"] for run in self.runs)

    def format(self) -> str:
        return f"{Spread.of(self.seconds).format(1e3, 3)}, {self.certified:.0%}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "temperature": self.temperature,
            "seconds": self.seconds,
            "seconds_per_token": asdict(Spread.of(self.seconds)),
            "certified_share": self.certified,
            "kept": self.kept,
        }


@dataclass(frozen=True)
class Overhead:
    """What a rule takes more than others, as a share of their time.

    value: of the medians over rounds.
    interval: 95 % bootstrap interval of `value`, for which whole rounds are drawn again, as noise hits all of a round.
    rounds: of each round's times.
    """

    value: float
    interval: tuple[float, float]
    rounds: Sequence[float]

    @classmethod
    def of(cls, ours: np.ndarray, others: np.ndarray) -> Overhead:
        """mean(ours) / mean(others) - 1. ours, others: seconds, [cells, rounds]."""
        count = ours.shape[1]
        drawn = np.random.default_rng(0).integers(count, size=(_RESAMPLED, count))
        low, high = np.quantile(_share(ours[:, drawn], others[:, drawn]), [0.025, 0.975])
        rounds = ours.mean(0) / others.mean(0) - 1
        return cls(float(_share(ours, others)), (float(low), float(high)), rounds.tolist())

    def format(self) -> str:
        low, high = self.interval
        return f"{percent(self.value)} ({low * 100:+.1f} to {high * 100:+.1f})"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "quartiles": asdict(Spread.of(self.rounds))}


def _share(ours: np.ndarray, others: np.ndarray) -> Any:
    """Of the medians over the last axis; [cells, ..., rounds] -> [...]."""
    return np.median(ours, -1).mean(0) / np.median(others, -1).mean(0) - 1


@dataclass(frozen=True)
class ModelReport:
    """One model, opened in one way.

    sampler: "native" or "graph".
    top_w: the label of Top-W.
    cells: of every temperature and rule, in the order of the request.
    """

    folder: Path
    sampler: str
    threads: int
    prompt_tokens: int
    top_w: str
    cells: Sequence[Cell]

    @property
    def title(self) -> str:
        return f"{self.folder}, {self.sampler}, {counted(self.threads, 'thread')}"

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(cell.temperature for cell in self.cells))

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(cell.rule for cell in self.cells))

    @property
    def others(self) -> list[str]:
        """The rules but Top-W."""
        return [rule for rule in self.rules if rule != self.top_w]

    @property
    def fastest(self) -> str:
        """The rule but Top-W with the lowest mean of medians over the temperatures."""
        return min(self.others, key=lambda rule: fmean(median(self.cell(rule, t).seconds) for t in self.temperatures))

    def cell(self, rule: str, temperature: float) -> Cell:
        return next(cell for cell in self.cells if (cell.rule, cell.temperature) == (rule, temperature))

    def overhead(self, temperature: float | None = None, *, rule: str | None = None, fastest: bool = False) -> Overhead:
        """What a rule takes more than the mean of the rules but Top-W: mean(rule) / mean(others) - 1.

        rule: None for Top-W.
        temperature: None for the mean of all temperatures.
        fastest: compare with the fastest of the others instead of their mean.
        """
        temperatures = self.temperatures if temperature is None else [temperature]

        def times(rules: Sequence[str]) -> np.ndarray:
            return np.array([self.cell(name, at).seconds for name in rules for at in temperatures])

        return Overhead.of(times([rule or self.top_w]), times([self.fastest] if fastest else self.others))

    def rows(self) -> Iterator[tuple[str, ...]]:
        for rule in self.rules:
            yield (rule, *(self.cell(rule, temperature).format() for temperature in self.temperatures))

    def overheads(self) -> tuple[str, ...]:
        """The model's row in the table of overheads."""
        each = (self.overhead(temperature).format() for temperature in self.temperatures)
        return (*each, self.overhead().format(), f"{self.overhead(fastest=True).format()} {self.fastest}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "sampler": self.sampler,
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "cells": [cell.as_dict() for cell in self.cells],
            "overhead": {
                **{f"{temperature:g}": self.overhead(temperature).as_dict() for temperature in self.temperatures},
                ALL: self.overhead().as_dict(),
            },
            "overhead_to_fastest": {"rule": self.fastest, **self.overhead(fastest=True).as_dict()},
        }


@dataclass(frozen=True)
class RulesReport:
    """Results. absent: (label, reason) of the samplers left out."""

    request: RulesRequest
    machine: Machine
    models: Sequence[ModelReport]
    absent: Sequence[tuple[str, str]]

    def text(self) -> str:
        asked = self.request
        prompts = sorted({model.prompt_tokens for model in self.models})
        tokens = f"{' or '.join(map(str, prompts))} + {asked.new_tokens} tokens"
        lines = [f"{self.machine}; {tokens}, {counted(asked.rounds, 'round')}"]
        temperatures = [f"T = {temperature:g}" for temperature in asked.temperatures]
        for model in self.models:
            lines += [f"\n{model.title}: ms/token (quartiles), certified tokens\n"]
            lines.append(table(("rule", *temperatures), model.rows()))
        compared = "the mean of the other rules" if len(asked.rules) > 2 else f"{self.models[0].others[0]}"
        lines += [f"\nOverhead of {asked.top_w} to {compared} (95 % interval over rounds)\n"]
        header = ("model", *temperatures, "all", "all, to the fastest")
        lines.append(table(header, [(model.title, *model.overheads()) for model in self.models]))
        return "\n".join([*lines, *closing_lines(self.absent, self.machine)])

    def as_dict(self) -> dict[str, Any]:
        settings = {**request_json(self.request), "folders": [str(folder) for folder in self.request.folders]}
        return {
            "benchmark": "rules",
            "machine": self.machine.as_dict(),
            "settings": settings,
            "models": [model.as_dict() for model in self.models],
            "absent": dict(self.absent),
        }


def percent(share: float) -> str:
    """0.0042 as "+0.4 %"."""
    return f"{share * 100:+.1f} %"

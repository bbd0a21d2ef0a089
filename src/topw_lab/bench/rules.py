"""`topw bench rules`: a token of each model under every sampling rule and temperature, and Top-W's overhead.

Measured: seconds per token after the first one, share of certified tokens and mean size of the kept sets. All rules
share one process and session per model. This file is also the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime.rule_settings import RuleSetting, rule_title
from topw_deploy.sampling.rules import TOP_W
from topw_deploy.text import count_text
from topw_lab.bench import base
from topw_lab.tables import table

_RESAMPLES = 2000
_AXIS = "one token after the first, mean over temperatures"

Cells = Mapping[tuple[str, float], Sequence[Mapping[str, float]]]
"""(label of a rule, temperature) -> the worker's result of each round."""


def run(
    folders: Sequence[Path],
    *,
    rules: Sequence[RuleSetting],
    temperatures: Sequence[float],
    samplers: Sequence[str] = (),
    prompt: str | None = None,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    threads: Sequence[int] = (1,),
    rounds: int = 20,
    seed: int = 0,
    progress: Progress = SILENT,
) -> base.Report:
    """Measure one model after the other, each in a process of its own.

    A round calls every rule at every temperature once, in random order. The n-th generation of all of them has the seed
    `seed` + n.

    folders: exported models; each is measured with every sampler and thread count.
    rules: Top-W once, and at least one other rule.
    samplers: "native" (the operator) and "graph" (the function in the file); empty for all that are available.
    prompt: the text to continue; None for `prompt_tokens` random tokens.
    new_tokens: number of tokens of a generation, at least 2, which does not end at EOS.
    rounds: number of generations per rule and temperature.
    seed: of the prompt, of the order and of the draws.

    Raises ManifestError for a folder without a decoder, ParameterError for rules without a comparison and for a prompt
    that does not fit, BenchmarkError for a named sampler that is not available, and errors of running the models.
    """
    settings = {name: value for name, value in locals().items() if name != "progress"}
    settings["rules"] = [rule.label for rule in rules]
    top_w = [rule.label for rule in rules if rule.parameters["rule"] == TOP_W.name]
    if len(top_w) != 1 or len(rules) < 2:
        names = ", ".join(rule.label for rule in rules)
        raise ParameterError(f"rules is {names}, but must have top_w once and at least one other rule.", "rules")
    prompts: dict[Path, str | list[int]] = {
        folder: prompt or base.random_prompt(folder, prompt_tokens, new_tokens, seed) for folder in folders
    }
    reasons = {"native": base.why_no_native_library(), "graph": None}
    every = [base.Side(name=name, label=name, kind="ours", settings={}, why_not=why) for name, why in reasons.items()]
    present, absent = base.choose(every, samplers)
    report = base.Report("rules", settings, absent, _AXIS)
    cells = {(rule.label, temperature): {"temperature": temperature, **rule.parameters}
             for temperature in temperatures for rule in rules}  # fmt: skip
    overheads = []
    total = len(prompts) * len(present) * len(threads) * len(cells) * (rounds + 1)
    with progress.bar(total, "generation") as advance:
        for folder, sampler, number in ((f, side.name, n) for f in prompts for side in present for n in threads):
            title = f"{folder.resolve().name}, {sampler}, {count_text(number, 'thread')}"
            opening = {"folder": str(folder), "sampler": sampler, "prompt": prompts[folder], "new_tokens": new_tokens}
            side = base.Side(name=title, label=title, kind="ours", worker=__file__, settings=opening)
            with base.start_workers([side], number, progress) as workers:
                calls = {f"{label} {temperature!r}": partial(_generate, workers[title].call, parameters, count(seed))
                         for (label, temperature), parameters in cells.items()}  # fmt: skip
                samples = base.interleave(calls, rounds, seed=seed, advance=advance)
            overheads.append(_add_results(report, title, top_w[0], dict(zip(cells, samples.values(), strict=True))))
    header = ("model", *(f"T = {temperature:g}" for temperature in temperatures), "all", "all, to the fastest")
    report.lines += [
        f"\nOverhead of {rule_title(top_w[0])} to the mean of the other rules, % (95 % interval over rounds)\n",
        table(header, overheads),
    ]
    return report


def _generate(call: Callable[..., Any], parameters: Mapping[str, Any], seeds: Any) -> Mapping[str, float]:
    result: Mapping[str, float] = call("run", parameters=parameters, seed=next(seeds))
    return result


def _add_results(report: base.Report, title: str, top_w: str, cells: Cells) -> list[str]:
    """Add one model to the report. Returns its line in the table of overheads."""
    labels = list(dict.fromkeys(label for label, _ in cells))
    temperatures = list(dict.fromkeys(temperature for _, temperature in cells))
    times = {cell: [run["seconds"] for run in runs] for cell, runs in cells.items()}
    certified = {cell: fmean(run["certified"] for run in runs) for cell, runs in cells.items()}
    shown = {cell: f"{base.Spread.of(times[cell]).format(1e3, 3)}, {certified[cell]:.0%}" for cell in cells}
    header = ("rule", *(f"T = {temperature:g}" for temperature in temperatures))
    rows = [(rule_title(label), *(shown[label, temperature] for temperature in temperatures)) for label in labels]
    report.add_table(f"{title}: ms/token (quartiles), certified tokens", header, rows)

    def compare(others: Sequence[str], at: Sequence[float]) -> tuple[float, float, float]:
        ours, theirs = ([times[rule, T] for rule in rules for T in at] for rules in ([top_w], others))
        return overhead(np.array(ours), np.array(theirs))

    others = [label for label in labels if label != top_w]
    fastest = min(others, key=lambda label: fmean(np.median(times[label, T]) for T in temperatures))
    compared = {
        **{f"{T:g}": compare(others, [T]) for T in temperatures},
        "all": compare(others, temperatures),
        f"all, to {fastest}": compare([fastest], temperatures),
    }
    report.runs.append({"title": title, "overhead": compared, "cells": [
        {"rule": cell[0], "temperature": cell[1], "seconds": times[cell], "certified_share": certified[cell],
         "kept": fmean(run["kept"] for run in runs)}
        for cell, runs in cells.items()
    ]})  # fmt: skip
    sides = [
        base.Side(name=label, label=rule_title(label), kind="ours" if label == top_w else "peer", settings={})
        for label in labels
    ]
    means = {label: np.mean([times[label, T] for T in temperatures], axis=0).tolist() for label in labels}
    value, low, high = compared["all"]
    change = f"{abs(value):.1%} {'more' if value > 0 else 'less'}"
    sentence = f"Top-W takes {change} than the mean of the other rules ({low:+.1%} to {high:+.1%})"
    bars = base.Times(sides, means)
    report.panels.append(bars.panel(title, sentence, lambda side: f"{bars.spread(side.name).median * 1e3:.3f} ms"))
    percents = [f"{value * 100:+.1f} ({low * 100:+.1f} to {high * 100:+.1f})" for value, low, high in compared.values()]
    return [title, *percents[:-1], f"{percents[-1]} {rule_title(fastest)}"]


def overhead(ours: np.ndarray, others: np.ndarray) -> tuple[float, float, float]:
    """mean(ours) / mean(others) - 1 of the medians over rounds, and the ends of its 95 % bootstrap interval.

    ours, others: seconds, [cells, rounds], with a cell per rule and temperature. Whole rounds are resampled, as noise
    affects all times of a round.
    """

    def of_medians(a: np.ndarray, b: np.ndarray) -> Any:
        """[cells, ..., rounds] -> [...]"""
        return np.median(a, -1).mean(0) / np.median(b, -1).mean(0) - 1

    resampled = np.random.default_rng(0).integers(ours.shape[1], size=(_RESAMPLES, ours.shape[1]))
    low, high = np.quantile(of_medians(ours[:, resampled], others[:, resampled]), [0.025, 0.975])
    return float(of_medians(ours, others)), float(low), float(high)


def start(settings: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Open the model. Returns `run`.

    settings: "folder" (the exported model), "sampler" ("native" or "graph"), "threads", "prompt" (a text or token ids),
        "new_tokens".
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
                f"{settings['folder']} ended after {drawn} of {new_tokens} tokens ({result.finish_reason}); give a "
                "shorter prompt or remove the stopping parameters from its generation_config.json."
            )
        seconds, certified = result.timings.seconds_per_token, result.certified_share
        return {"seconds": seconds, "certified": certified, "kept": sum(result.kept) / drawn}

    return {"run": run}

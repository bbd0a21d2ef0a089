"""Sampling rules under the exact objective, on two models and several seeds. Results: docs/lab/results.md.

    topw-export tiny out-demo
    python -m benchmarks.sums.train
    topw-export .cache/benchmarks/sums out-sums
    python -m benchmarks.exact_rules --demo out-demo --sums out-sums [--seeds 3] [--steps 97] [--json FILE]

The bundled model continues examples/prompts.txt; the other one answers held-out problems (benchmarks.sums). Every
prompt is answered once per seed by Top-W with the paper's `lam` and `beta`, with distances as exported and in units of
their median. Intervals cover 95 %: a bootstrap over prompts, with all texts of a prompt together. If the number of
tokens per analysed step divides the length of the texts, every text is analysed at the same position: choose another
number of steps. Needs the extra `exact`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import say, table
from benchmarks.sums.problems import problems
from topw_deploy.errors import TopWError
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_lab.stats.collect import collect
from topw_lab.stats.exact_report import ExactSummary, RuleUnderF, summarise_exact

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.txt"
SCALES: dict[str, dict[str, Any]] = {
    "the metric's own unit": {"geom_scale": 1.0},
    "per median distance": {"geom_scale": 1.0, "geom_unit": "median"},
}
"""Unit of the distances -> parameters of a request."""


def prompts_of(name: str, count: int) -> list[tuple[str, str]]:
    """The prompts of the model `name`, "demo" or "sums"."""
    if name == "demo":
        texts = PROMPTS.read_text(encoding="utf-8").splitlines()
    else:
        texts = [problem.prompt for problem in islice(problems(0, held_out=True), count)]
    return [(text, f"prompt {number}") for number, text in enumerate(texts[:count], 1)]


def measure(folder: Path, name: str, options: argparse.Namespace) -> dict[str, list[ExactSummary]]:
    """Unit of the distances -> a summary per temperature."""
    found = {}
    for unit, given in SCALES.items():
        say(f"{name}, {unit}")
        settings = [RuleSetting(f"{T:g}", {**given, "temperature": T}) for T in options.temperatures]
        collected = collect(
            folder,
            prompts_of(name, options.prompts),
            settings,
            generation={"max_new_tokens": options.max_new_tokens, "seed": 0, "lam": 2.2, "beta": 2.8},
            seeds=options.seeds,
            exact_steps=options.steps,
        )
        found[unit] = summarise_exact(collected)
    return found


def _cell(rule: RuleUnderF) -> str:
    return f"{rule.median.text('.3g')}, {rule.optimal.value:.1%}"


def report(name: str, unit: str, summaries: Sequence[ExactSummary], seeds: int) -> str:
    """A table: F above the best prefix, median (interval), and the share of the steps where the rule is as good."""
    first = summaries[0]
    title = (
        f"{name}, {unit}: geom_scale {first.parameters['geom_scale']:.4g}; {first.prompts} prompts, {seeds} seeds; "
        f"{' '.join(str(each.steps) for each in summaries)} steps"
    )
    rows = [[rule.name, *(_cell(each.rules[place]) for each in summaries)] for place, rule in enumerate(first.rules)]
    rows.append(["best prefix, tokens, median", *(f"{each.likeliest.median:g}" for each in summaries)])
    rows.append(["Top-W, tokens, mean", *(f"{each.rules[0].means['kept']:.2f}" for each in summaries)])
    return f"{title}\n\n{table(('temperature', *(each.label for each in summaries)), rows)}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact_rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--demo", type=Path, metavar="FOLDER", help="the exported bundled model")
    parser.add_argument("--sums", type=Path, metavar="FOLDER", help="the exported model of benchmarks.sums")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0], metavar="T")
    parser.add_argument("--seeds", type=int, default=3, help="texts per prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of each text (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=97, help="analysed per temperature, evenly spaced (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every analysed step to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    folders = {name: getattr(options, name) for name in ("demo", "sums") if getattr(options, name) is not None}
    if not folders:
        raise SystemExit("give --demo FOLDER, --sums FOLDER or both")
    found: dict[str, dict[str, list[ExactSummary]]] = {}
    try:
        for name, folder in folders.items():
            found[name] = measure(folder, name, options)
            for unit, summaries in found[name].items():
                print(report(name, unit, summaries, options.seeds), end="\n\n", flush=True)
    except TopWError as error:
        raise SystemExit(str(error)) from None
    if options.json:
        content = {name: {u: [asdict(s) for s in each] for u, each in units.items()} for name, units in found.items()}
        options.json.write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

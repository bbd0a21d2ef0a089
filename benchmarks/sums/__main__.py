"""Accuracy of the trained model by sampling rule and temperature. Results: docs/lab/results.md.

    python -m benchmarks.sums.train
    topw-export .cache/benchmarks/sums out-sums
    python -m benchmarks.sums --folder out-sums --temperatures 0.5 1 1.5 2 --rules top_w top_p=0.9 min_p=0.1 --seeds 5

A rule is `greedy`, or a setting as in `topw bench rules` (`top_w`, `min_p=0.1`, `top_w:lam=2.2:beta=2.8`).
Every seed has its own held-out problems. All rules and temperatures answer the same problems with the same random
numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import machine, say
from benchmarks.sums.picture import save_plot
from benchmarks.sums.problems import Problem, problems
from benchmarks.sums.scores import Cell, accuracy_table, details_table, difference_table
from benchmarks.sums.sides import GREEDY, EngineSide, Reply, read_rule
from topw_deploy.errors import TopWError
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_lab.plots import require_matplotlib

RULES = ("greedy", "top_w", "top_w:preset=lively", "none", "top_k=50", "top_p=0.9", "min_p=0.1", "top_h=0.4")


def measure(
    side: EngineSide, rules: Sequence[RuleSetting], temperatures: Sequence[float], asked: Sequence[Sequence[Problem]]
) -> list[Cell]:
    """Answer the problems: a cell per rule and temperature, and one for greedy.

    asked: the problems of each seed.
    """
    cells = []
    flat = [problem for group in asked for problem in group]
    for rule in rules:
        for temperature in [None] if rule.label == GREEDY else temperatures:
            replies: list[Reply] = []
            for seed, group in enumerate(asked):
                replies += side.replies(group, rule, temperature or 0.0, seed)
            cells.append(Cell.of(rule.label, temperature, flat, replies))
            at = "" if temperature is None else f", T = {temperature:g}"
            say(f"{rule.label}{at}: {cells[-1].accuracy:.1%}")
    return cells


def report(cells: Sequence[Cell], title: str) -> str:
    parts = [title, "Accuracy in per cent (95 % Wilson interval):", accuracy_table(cells)]
    sampled = list(dict.fromkeys(cell.rule for cell in cells if cell.temperature is not None))
    if len(sampled) > 1:
        parts += [f"Points above {sampled[0]}, same problems (± 95 % normal interval):", difference_table(cells)]
    parts += ["Kept tokens per step / replies without an answer:", details_table(cells)]
    return "\n\n".join(parts)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sums", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="an export")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0], metavar="T")
    parser.add_argument("--rules", nargs="+", default=list(RULES), metavar="RULE", help=f"default: {' '.join(RULES)}")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--problems", type=int, default=100, help="per seed (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="rows that run at once (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads; default: the library's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy over temperature (.png)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    if options.plot:
        require_matplotlib()
    rules = [read_rule(text) for text in options.rules]
    asked = [list(islice(problems(seed, held_out=True), options.problems)) for seed in range(options.seeds)]
    side = EngineSide(options.folder, options.batch, options.threads)
    try:
        cells = measure(side, rules, options.temperatures, asked)
    finally:
        side.close()
    title = f"{options.folder.name}; {options.seeds} seeds of {options.problems} problems; {machine()}"
    print(report(cells, title))
    if options.json:
        content: dict[str, Any] = {"title": title, "seeds": options.seeds, "problems": options.problems}
        content["cells"] = [cell.as_json() for cell in cells]
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        save_plot(cells, options.plot, "Sums solved by sampling rule, with 95 % intervals")


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        run(parse_arguments(arguments))
    except TopWError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()

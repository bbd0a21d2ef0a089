"""Simulates many replicas of the engine. Results: docs/guide/scale.md.

    python -m benchmarks.fleet --measure OUT [--rows 8] [--chunk 256] [--costs FILE]
    python -m benchmarks.fleet --compare OUT [--costs FILE]
    python -m benchmarks.fleet [--costs FILE] [--replicas 1000] [--loads 0.5 0.7 ...] [--json FILE] [--plot FILE]

The first measures an exported model's runs on this machine and writes them to FILE. The second compares the same
requests on a real engine and on a simulated one, on a clock that the engine's runs advance by their times in FILE, so
that the machine's speed does not matter. The third simulates replicas with these costs behind several
routings; the same seed gives the same figures. Without FILE, the costs are those of the stored figures in
docs/lab/results.md. Loads are shares of the replicas' capacity without reuse of prefixes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import say, table
from benchmarks.fleet.compare import compare
from benchmarks.fleet.costs import Costs, measure, stored_costs
from benchmarks.fleet.simulate import ROUTINGS, simulate
from benchmarks.fleet.workload import Requests, Workload, draw_requests

COLOURS = ("#B8BEC6", "#E69F00", "#0072B2", "#D55E00")
COMPARED = (0.3, 0.6, 0.85)
GROUPS = 12  # of one replica


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="OUT", help="measure this exported model")
    parser.add_argument("--compare", type=Path, metavar="OUT", help="run the same requests on a real engine")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--costs", type=Path, help="file of measured costs; otherwise stored ones are used")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1])
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--requests", type=int, default=40, help="for each replica")
    for name, value in asdict(Workload()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    workload = Workload(**{name: getattr(args, name) for name in asdict(Workload())})
    if args.measure is not None:
        if args.costs is None:
            parser.error("--measure needs --costs FILE")
        measure(args.measure, args.rows, args.chunk).save(args.costs)
        return
    if args.compare is not None:
        print(comparison_table(args.compare, args, workload))
        return
    rows = simulate_loads(args, workload)
    header = ("load", "routing", "requests/s", "first token p50", "p99", "whole answer p50", "p99", "reused")
    print(table(header, [_table_cells(row) for row in rows]))
    if args.json is not None:
        settings = {**asdict(workload), "replicas": args.replicas, "requests": args.requests, "seed": args.seed}
        document = {"settings": settings, "costs": asdict(chosen_costs(args)), "results": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if args.plot is not None:
        draw_picture(rows, args)


def chosen_costs(args: argparse.Namespace) -> Costs:
    """The costs in the file, or the stored ones."""
    return stored_costs(args.rows) if args.costs is None else Costs.load(args.costs)


def comparison_table(folder: Path, args: argparse.Namespace, workload: Workload) -> str:
    """A table of a real engine's figures and the simulation's."""
    costs = chosen_costs(args)
    requests = draw_requests(replace(workload, groups=min(workload.groups, GROUPS)), 25 * costs.rows, args.seed)
    rows = []
    for load in COMPARED:
        say(f"comparing at load {load:g}")
        rows += compare(folder, costs, requests, load).rows()
    return table(("load", "", "engine", "simulated", "ratio"), rows)


def capacity(costs: Costs, requests: Requests, replicas: int) -> float:
    """Requests per second that `replicas` can answer without reuse of prefixes."""
    return replicas / costs.request(float(requests.prompt.mean()), float(requests.new.mean()))


def simulate_loads(args: argparse.Namespace, workload: Workload) -> list[dict[str, Any]]:
    """One result per load and routing. Seconds."""
    costs = chosen_costs(args)
    requests = draw_requests(workload, args.requests * args.replicas, args.seed)
    most = capacity(costs, requests, args.replicas)
    found = []
    for load in args.loads:
        timed = requests.at_rate(load * most)
        for routing in args.routings:
            say(f"load {load:g}, {routing}")
            outcome = simulate(costs, timed, args.replicas, routing, args.seed)
            first, whole = (np.percentile(values, (50, 99)).tolist() for values in (outcome.first, outcome.whole))
            result = {"load": load, "routing": routing, "rate": load * most, "first": first, "whole": whole}
            found.append({**result, "reused": outcome.reused})
    return found


def _table_cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = [_format_seconds(seconds) for seconds in (*row["first"], *row["whole"])]
    return f"{row['load']:g}", row["routing"], f"{row['rate']:,.0f}", *times, f"{row['reused']:.0%}"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def draw_picture(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The time to the first token against the load, for each routing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    for axes, index, title in zip(
        figure.subplots(1, 2, sharey=True), (0, 1), ("median", "99th percentile"), strict=True
    ):
        for colour, routing in zip(COLOURS, args.routings, strict=False):
            points = [(row["load"], row["first"][index] * 1e3) for row in rows if row["routing"] == routing]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=routing)
        axes.set(title=f"First token, {title}", xlabel="load, share of the capacity without reuse", yscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("ms")
    figure.axes[0].legend(frameon=False)
    figure.savefig(args.plot)


if __name__ == "__main__":
    main()

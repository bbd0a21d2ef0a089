"""Time of one row in the native sampler, through ctypes on one thread. Results: docs/lab/results.md.

    python -m benchmarks.native_rows [--rounds 100] [--count 64]

Compares rows of a trained model under every rule with numpy.max, with warm caches (ten consecutive calls). The trained
model is the bundled one, whose 4,096 tokens are extended by less likely variants of them
(benchmarks/trained_rows.py).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import interleave, machine, say, seconds, table
from benchmarks.function import VOCAB
from benchmarks.trained_rows import logits_of, trained_model
from tests.support.kernel import Kernel
from topw_deploy.plugins.library import library_path, why_absent
from topw_deploy.sampling import TopWOptions

TRAINED_TEMPERATURES = (0.5, 1.0)
_CHIP = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}


def trained_table(kernel: Kernel, rounds: int, count: int) -> str:
    """Every rule's time on a trained model's rows at two temperatures, relative to numpy.max."""
    say(f"computing {count} rows of the trained model")
    rows, parts = logits_of(trained_model(VOCAB), count), []
    for temperature in TRAINED_TEMPERATURES:
        found = time_rules(kernel, rows, temperature, max(3, rounds // 10))
        parts.append(f"T = {temperature:g}:\n\n{rule_table(found)}")
    return "\n\n".join(parts)


RULES: dict[str, tuple[int, tuple[float, float]]] = {
    "top_k 50": (1, (50, 0)),
    "top_p 0.9": (2, (0.9, 0)),
    "top_p 0.95": (2, (0.95, 0)),
    "min_p 0.05": (3, (0.05, 0)),
    "min_p 0.1": (3, (0.1, 0)),
    "top_h 0.4": (4, (0.4, 100)),
    "typical 0.9": (5, (0.9, 0)),
    "epsilon 0.001": (6, (1e-3, 0)),
    "eta 0.002": (7, (2e-3, 0)),
    "top_n_sigma 1": (8, (1, 0)),
    "p_less": (9, (0, 0)),
    "min_k 3": (10, (3, 0)),
    "none": (11, (0, 0)),
}
"""Label -> (code, values)."""


@dataclass(frozen=True)
class TimedRow:
    """One row under one rule.

    ratio: its median time relative to numpy.max over the same row.
    """

    ratio: float
    certified: bool
    kept: int


def time_rules(kernel: Kernel, rows: np.ndarray, temperature: float, rounds: int) -> dict[str, list[TimedRow]]:
    """Time Top-W and all RULES on logits float32 [N, V], ten calls in a row and all sides of a row in turn."""
    options = TopWOptions(metric="uniform")
    columns = {"temperature": temperature, "uniform": 0.5}
    found: dict[str, list[TimedRow]] = {name: [] for name in ("Top-W", *RULES)}
    for row in rows:
        calls = {"Top-W": kernel.prepare(row[None], columns, options)}
        calls |= {name: kernel.prepare(row[None], columns, options, rules=rule) for name, rule in RULES.items()}
        timed = {"numpy.max": lambda row=row: seconds(row.max, 10)}
        timed |= {name: (lambda call=call: seconds(call, 10)) for name, call in calls.items()}
        times = {name: statistics.median(samples) for name, samples in interleave(timed, rounds).items()}
        for name, call in calls.items():
            samples = call.samples
            ratio = times[name] / times["numpy.max"]
            found[name].append(TimedRow(ratio, bool(samples.certified[0]), int(samples.kept[0])))
    return found


def rule_table(found: dict[str, list[TimedRow]]) -> str:
    """A table of the rules: certified rows, and the ratios (median and range) over those and over all rows."""
    lines = []
    for name, rows in found.items():
        certified, kept = [row for row in rows if row.certified], [row.kept for row in rows]
        lines.append(
            (
                name,
                f"{len(certified)} of {len(rows)}",
                _format_ratios(certified),
                _format_ratios(rows),
                f"{min(kept):,} to {max(kept):,}",
            )
        )
    return table(("rule", "certified", "ratio to numpy.max, certified rows", "all rows", "tokens kept"), lines)


def _format_ratios(rows: Sequence[TimedRow]) -> str:
    """1.29 (1.21-81.3); a dash without rows."""
    if not rows:
        return "-"
    ratios = [row.ratio for row in rows]
    return f"{_format_ratio(statistics.median(ratios))} ({_format_ratio(min(ratios))}-{_format_ratio(max(ratios))})"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def chip(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's family and model, which names like `AMD EPYC` leave out; "unknown chip" if Linux gives none."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    fields = {name.strip(): value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
    numbers = [f"{label} {fields[name]}" for name, label in _CHIP.items() if name in fields]
    return ", ".join(numbers) or "unknown chip"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--count", type=int, default=64, help="rows of the trained model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = library_path()
    if path is None:
        raise SystemExit(f"there is no native sampler: {why_absent()}.")
    kernel = Kernel(path)
    print(f"{machine()}; {chip()}; 1 thread, {kernel.instruction_set}\n")
    title = f"Rows of the trained model, vocabulary {VOCAB:,}"
    print(f"{title}:\n\n{trained_table(kernel, given.rounds, given.count)}")


if __name__ == "__main__":
    main()

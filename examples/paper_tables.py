"""Commands for every cell of the Top-W paper's tables (docs/guide/evaluation.md): prints them, or runs them with --run.

    topw-export Qwen/Qwen2.5-3B out --preset released
    python examples/paper_tables.py out                                      # prints every command
    python examples/paper_tables.py out --only gsm8k --seeds 1 2 3 --run     # runs three seeds of one benchmark
    python examples/paper_tables.py out --only gsm8k --seeds 1 2 3 --table   # prints their accuracy

A cell is a benchmark, a rule, a temperature and a seed. Its results go to RESULTS/BENCHMARK/RULE-tTEMPERATURE-sSEED;
--run skips cells that have theirs. `speed` is one command for all rules and temperatures.

GSM8K and GPQA come from the hub, where GPQA is gated. Save AlpacaEval's and MT-Bench's questions as FILE first. What
judges their answers, and those of `creative`, is not run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPERATURES = (0.5, 0.7, 1.0, 1.5, 2.0)  # arXiv 2602.10346v2; the first version has 1, 1.5 and 2

# Baselines: arXiv 2509.02510, section 6.1, which takes the best of the three values of top_k.
RULES: Mapping[str, Mapping[str, str]] = {
    "top_w": {"lam": "2.2", "beta": "2.8"},
    "top_k_10": {"rule": "top_k", "top_k": "10"},
    "top_k_20": {"rule": "top_k", "top_k": "20"},
    "top_k_50": {"rule": "top_k", "top_k": "50"},
    "top_p": {"rule": "top_p", "top_p": "0.9"},
    "min_p": {"rule": "min_p", "min_p": "0.1"},
    "eta": {"rule": "eta", "eta_cutoff": "0.0002"},
    "top_h": {"rule": "top_h", "top_h": "0.4"},
    "none": {"rule": "none"},
}
"""Name -> parameters of a request."""

PAPER = tuple(name for name in RULES if name != "none")
CREATIVE = {"top_w": {"lam": "2.2", "beta": "1.5+1.5*T"}}  # the preset `creative`, with the export's other parameters


@dataclass(frozen=True)
class Task:
    """A task of lm-evaluation-harness.

    examples: number of examples in a prompt.
    score: the score to compare; exact_match after this filter.
    """

    name: str
    examples: int
    score: str


HERE = Path(__file__).parent
TASKS = {
    "gsm8k": Task("gsm8k_cot", 8, "flexible-extract"),
    "gpqa": Task("gpqa_main_generative_n_shot", 8, "flexible-extract"),
}
JUDGED = {"alpaca_eval": "alpaca_eval", "mt_bench": "mt_bench", "creative": "alpaca_eval"}
"""Benchmark -> its --format."""

BENCHMARKS = ("gsm8k", "gpqa", *JUDGED, "speed")


@dataclass(frozen=True)
class Cell:
    """A command and what it writes: a folder or a file."""

    words: list[str]
    output: Path


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The chosen cells, by benchmark, seed, temperature and rule."""
    for benchmark in options.only:
        if benchmark == "speed":
            yield speed(options)
            continue
        for seed in options.seeds:
            for temperature in options.temperatures:
                for name in options.rules:
                    rule = RULES[name] if benchmark != "creative" else {**RULES, **CREATIVE}[name]
                    output = place(options, benchmark, name, temperature, seed)
                    parameters = {**rule, "temperature": f"{temperature:g}", "seed": str(seed)}
                    make = task if benchmark in TASKS else judged
                    yield make(options, benchmark, parameters, output)


def place(options: argparse.Namespace, benchmark: str, rule: str, temperature: float, seed: int) -> Path:
    """Where a cell's results are, without a suffix."""
    path: Path = options.results / benchmark / f"{rule}-t{temperature:g}-s{seed}"
    return path


def task(options: argparse.Namespace, benchmark: str, parameters: Mapping[str, str], output: Path) -> Cell:
    """A task of lm-evaluation-harness."""
    chosen = TASKS[benchmark]
    arguments = ",".join(f"{name}={value}" for name, value in {"path": options.folder, **parameters}.items())
    words = ["topw", "lm-eval", "--model_args", arguments, "--tasks", chosen.name]
    words += ["--num_fewshot", str(chosen.examples), "--batch_size", str(options.batch_size)]
    words += ["--output_path", str(output), "--log_samples"]
    return Cell(words + (["--limit", str(options.limit)] if options.limit else []), output)


def judged(options: argparse.Namespace, benchmark: str, parameters: Mapping[str, str], output: Path) -> Cell:
    """Answers for a judge; an interrupted command continues."""
    output = output.with_name(f"{output.name}.json{'l' if benchmark == 'mt_bench' else ''}")
    words = ["topw", "generate", str(options.folder), "--chat", "--prompts-jsonl", str(getattr(options, benchmark))]
    words += ["--format", JUDGED[benchmark], "--model-id", output.stem, "--output", str(output), "--resume"]
    words += ["--batch-size", str(options.batch_size), "--max-new-tokens", str(options.max_new_tokens)]
    for name, value in parameters.items():
        words += [f"--{name.replace('_', '-')}", value]
    return Cell(words, output)


def speed(options: argparse.Namespace) -> Cell:
    """ms per token under every rule, whatever --rules is, and every temperature."""
    output = options.results / "speed.json"
    others = [RULES[name] for name in PAPER if name != "top_w"]
    rules = ["top_w", *(f"{rule['rule']}={value}" for rule in others for key, value in rule.items() if key != "rule")]
    temperatures = ",".join(f"{temperature:g}" for temperature in options.temperatures)
    words = ["topw", "bench", "rules", str(options.folder), "--rules", ",".join(rules)]
    return Cell([*words, "--temperatures", temperatures, "--json", str(output)], output)


def run(chosen: Sequence[Cell]) -> None:
    """Run each cell that has no output, and stop at the first one that fails."""
    for cell in chosen:
        if cell.output.exists():
            print(f"{cell.output} exists", file=sys.stderr)
            continue
        cell.output.parent.mkdir(parents=True, exist_ok=True)
        print(shlex.join(cell.words), file=sys.stderr)
        done = subprocess.run([sys.executable, "-m", "topw_deploy", *cell.words[1:]])
        if done.returncode:
            raise SystemExit(done.returncode)


def table(options: argparse.Namespace, benchmark: str) -> str:
    """Accuracy in per cent by rule and temperature, in Markdown: the mean over the seeds that have results, with their
    standard deviation if there are several."""
    rows = [f"| {benchmark} | " + " | ".join(f"T = {temperature:g}" for temperature in options.temperatures) + " |"]
    rows.append("|---" * (len(options.temperatures) + 1) + "|")
    for rule in options.rules:
        found = [
            [value for seed in options.seeds for value in accuracy(options, benchmark, rule, temperature, seed)]
            for temperature in options.temperatures
        ]
        rows.append(f"| {rule} | " + " | ".join(map(shown, found)) + " |")
    return "\n".join(rows)


def accuracy(options: argparse.Namespace, benchmark: str, rule: str, temperature: float, seed: int) -> list[float]:
    """The score of a cell's last run, in per cent; empty without results."""
    written = sorted(place(options, benchmark, rule, temperature, seed).rglob("results_*.json"))
    if not written:
        return []
    results = json.loads(written[-1].read_text("utf-8"))["results"]
    return [100 * results[TASKS[benchmark].name][f"exact_match,{TASKS[benchmark].score}"]]


def shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="OUT", type=Path, help="the exported model; its path must have no comma")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="benchmarks; default: the paper's"
    )
    parser.add_argument("--rules", nargs="+", choices=[*RULES], default=PAPER, help="default: all but none")
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES, metavar="T")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="SEED", help="default: 1")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    parser.add_argument("--alpaca-eval", type=Path, default=Path("alpaca_eval.json"), metavar="FILE", help="questions")
    parser.add_argument("--mt-bench", type=Path, default=Path("question.jsonl"), metavar="FILE", help="questions")
    parser.add_argument(
        "--creative", type=Path, default=HERE / "creative.json", metavar="FILE", help="default: examples/creative.json"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="default: 8")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="of answers for judges; default: 1024")
    parser.add_argument("--limit", type=int, help="only this many questions of gsm8k and gpqa")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--run", action="store_true", help="run the commands; default: print them")
    action.add_argument("--table", action="store_true", help="print the accuracies that --run found")
    options = parser.parse_args(words)
    if "," in str(options.folder):
        parser.error(f"{options.folder} has a comma, which separates arguments of lm-evaluation-harness; rename it")
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse_arguments(words)
    if options.table:
        print(*(table(options, benchmark) for benchmark in options.only if benchmark in TASKS), sep="\n\n")
        return
    chosen = list(cells(options))
    if options.run:
        run(chosen)
    else:
        print(*(shlex.join(cell.words) for cell in chosen), sep="\n")


if __name__ == "__main__":
    main()

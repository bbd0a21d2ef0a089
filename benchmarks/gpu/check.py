"""The part `check`: the kernels against the reference, and repeatability."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from benchmarks.common import table
from benchmarks.gpu.device import open_kernel, random_rows
from benchmarks.gpu.job import Job, Result, Step, sizes_of
from benchmarks.gpu.rows import compare, cpu_kernel, random_table_on, unequal_alone, unequal_repeats
from fuzz import rules as rule_rows
from fuzz.sampler import Outcome, Side, fuzz_kernel, report
from tests.support.rows import nearest_distances
from topw_deploy.sampling import FLOAT32_TIES

_CHUNK = 2_000  # random rows per record
_SHOWN = 20  # maximum differences recorded
_TYPES = {"float32": "cosine", "float16": "mahalanobis", "bfloat16": "cosine"}  # logits type -> metric


def steps(job: Job) -> list[Step]:
    vocab = sizes_of(job).vocab
    shipped = [
        Step(f"rows of {vocab:,} tokens, {dtype}", partial(shipped_rows, dtype=dtype), 60, 300) for dtype in _TYPES
    ]
    return [  # random rows come last, because they use the remaining time and continue in the next run
        Step("repeats and batches", repeats, 20, 180),
        *shipped,
        Step("rules", rules, 30, 240, (str(job.seed),)),
        Step("random rows", compare_random_rows, 60, 450, (str(job.rows), str(job.seed))),
    ]


def repeats(job: Job) -> Result:
    """Repeat launches, and launch every row of a batch alone."""

    sizes, kernel = sizes_of(job), open_kernel(job)
    batch, times = (12, 2) if job.rehearse else (64, 200)
    embeddings = random_table_on(kernel, sizes.small_vocab, sizes.small_hidden)
    again = unequal_repeats(kernel, embeddings, batch, times)
    alone = unequal_alone(kernel, embeddings, batch)
    lines = [
        f"- {times - len(again)} of {times} repeated launches of {batch} rows answer bit for bit as the first",
        f"- {batch - len(alone)} of {batch} rows answer bit for bit alone as in the batch",
    ]
    failed = f"repeats {again[:20]} and rows alone {alone[:20]} answered otherwise." if again or alone else ""
    data = {"batch": batch, "repeats": times, "unequal repeats": again, "rows unequal alone": alone}
    return Result(data, "\n".join(lines), failed)


def shipped_rows(job: Job, dtype: str) -> Result:
    """Compare shipped-shape rows with the CPU's kernel and the reference."""

    sizes, kernel = sizes_of(job), open_kernel(job)
    rows = random_rows(sizes.vocab, sizes.hidden, kernel.device)
    cpu = cpu_kernel(job.kernels())
    found = compare(kernel, rows, _TYPES[dtype], dtype, sizes.checked, cpu)
    total = sum(found.rows.values())
    lines = [
        (kind, count, ", ".join(f"{stage.split(': ')[1]} {n}" for stage, n in sorted(found.stages.items())
                                if stage.startswith(f"{kind}:")))
        for kind, count in found.rows.items()
    ]  # fmt: skip
    beside = "the CPU's kernel" if cpu is not None else "the reference alone"
    text = (
        f"V = {sizes.vocab:,}, d = {sizes.hidden:,}, {_TYPES[dtype]}, batches {', '.join(map(str, sizes.checked))}: "
        f"{total} rows compared with {beside}, {found.by_reference} of them compared with the reference; "
        f"{sum(found.explained.values())} differ at a tie, {len(found.wrong)} without one.\n\n"
    ) + table(("rows", "number", "answered by"), lines)
    data = {"rows": dict(found.rows), "stages": dict(found.stages), "explained": dict(found.explained),
            "wrong": found.wrong[:_SHOWN], "by reference": found.by_reference}  # fmt: skip
    failed = f"{len(found.wrong)} differences are not at a tie: {found.wrong[0]}" if found.wrong else ""
    return Result(data, text, failed)


def rules(job: Job) -> Result:
    """Compare random rows under rules other than Top-W with the reference."""

    found = rule_rows.fuzz(open_kernel(job), sizes_of(job).rule_rows, job.seed)
    wrong = found.differences
    text = f"{sum(found.rows.values())} rows; {len(wrong)} differ without a tie.\n\n{rule_rows.report(found)}"
    stages = [[*pair, count] for pair, count in found.stages.items()]
    data = {"rows": dict(found.rows), "stages": stages, "wrong": wrong[:_SHOWN]}
    return Result(data, text, f"{len(wrong)} differences are not at a tie: {wrong[0]}" if wrong else "")


def compare_random_rows(job: Job) -> Result:
    """Compare random and adversarial rows with the reference, continuing after the chunks already recorded."""

    kernel = open_kernel(job)
    rows = min(job.rows, sizes_of(job).rows)
    outcome, done, chunk = Outcome({"cuda": Side()}, FLOAT32_TIES), 0, 0
    if job.earlier:
        done, chunk = job.earlier["rows"], job.earlier["chunks"]
        add_counts(outcome, job.earlier["outcome"])
    while done < rows:
        size = min(_CHUNK, rows - done)
        found = fuzz_kernel(kernel, size, job.seed * 100_003 + chunk, first=13 * chunk, measure=nearest_distances)
        add_counts(outcome, as_plain_json(found))
        done, chunk = done + size, chunk + 1
        job.keep({"rows": done, "chunks": chunk, "outcome": as_plain_json(outcome)})
        if job.left() < 0:  # at least one chunk per run
            break
    unexplained = outcome.unexplained
    failed = f"{len(unexplained)} differences are not at a tie: {unexplained[0][:800]}" if unexplained else ""
    data = {"rows": done, "wanted": rows, "chunks": chunk, "outcome": as_plain_json(outcome)}
    return Result(data, f"{done:,} of {rows:,} rows.\n\n{report(outcome)}", failed, partial=done < rows)


def as_plain_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain JSON types, for `add`."""
    side = next(iter(outcome.sides.values()))
    return {
        "rows": dict(outcome.rows), "certified": dict(outcome.certified), "tied": outcome.tied,
        "nearly_tied": outcome.nearly_tied, "unexplained": side.unexplained[:_SHOWN],
        "stages": [[*pair, count] for pair, count in side.stages.items()],
        "explained": dict(side.explained),
    }  # fmt: skip


def add_counts(outcome: Outcome, found: dict[str, Any]) -> None:
    """Add the counts of `plain` to the outcome."""
    side = next(iter(outcome.sides.values()))
    outcome.rows.update(found["rows"])
    outcome.certified.update(found["certified"])
    outcome.tied += found["tied"]
    outcome.nearly_tied += found["nearly_tied"]
    side.unexplained += found["unexplained"]
    side.stages.update(Counter({(regime, stage): count for regime, stage, count in found["stages"]}))
    side.explained.update(found["explained"])

"""The part `speed`: step times in a CUDA graph, against torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.gpu.job import Job, Result, Step
from benchmarks.gpu.sizes import sizes_of

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.measure import Timed, Times

_METRICS = ("cosine", "mahalanobis")
_DECODER_STEPS = 5  # steps in a graph, each of more than a millisecond


def steps(job: Job) -> list[Step]:
    sizes, rounds = sizes_of(job), (str(job.rounds),)
    certified = [
        Step(f"certified rows, batch {batch}", partial(certified_rows, batch=batch), 15, 120, rounds)
        for batch in sizes.certified
    ]
    uncertified = [
        Step(f"open rows, {metric}, batch {batch}", partial(open_rows, metric=metric, batch=batch), 20, 150, rounds)
        for batch in sizes.open_batches
        for metric in _METRICS
    ]
    return [*certified, *uncertified, Step("share of a decode step", decode_step, 30, 180, rounds)]


def certified_rows(job: Job, batch: int) -> Result:
    """Time certified rows: logits types, warm and cold caches, separate launches, torch operations."""
    from benchmarks.gpu import certified
    from benchmarks.gpu.device import open_kernel

    sizes, kernel = sizes_of(job), open_kernel(job)
    logits = certified.logits_on(kernel.device, batch, sizes.vocab)
    try:
        sides = certified.top_w_sides(kernel, logits, sizes)
    except certified.NotCertifiedError as error:
        return Result(failed=str(error))
    sides |= certified.torch_sides(logits, sizes.top_m)
    return _result(job, f"{sizes.vocab:,} tokens, batch {batch}", *_measured(job, kernel.device, sides))


def open_rows(job: Job, metric: str, batch: int) -> Result:
    """Time open rows at the shipped size."""
    from benchmarks.gpu import open_rows as rows
    from benchmarks.gpu.device import open_kernel
    from benchmarks.gpu.tables import random_rows

    sizes, kernel = sizes_of(job), open_kernel(job)
    table = random_rows(sizes.vocab, sizes.hidden, kernel.device)
    try:
        sides = rows.sides(kernel, table, metric, batch, sizes.top_m)
    except rows.NotOpenError as error:
        return Result(failed=str(error))
    what = f"{sizes.vocab:,} tokens, d = {sizes.hidden:,} in float16, {metric}, batch {batch}"
    return _result(job, what, *_measured(job, kernel.device, sides))


def decode_step(job: Job) -> Result:
    """Time a captured decode step with Top-W, minus the step without it."""
    from benchmarks.common import Spread
    from benchmarks.gpu.decoder import decoder, sampler
    from benchmarks.gpu.device import open_kernel
    from benchmarks.gpu.measure import Timed

    sizes, kernel = sizes_of(job), open_kernel(job)
    model = decoder(kernel.device, sizes.decoder)
    model.step()
    top_w = sampler(kernel, model.logits, sizes.decoder[0])
    top_w.launch()
    if not top_w.samples().certified.all():
        return Result(failed="the decoder's row is not certified, so this measures another case.")

    def both() -> None:
        model.step()
        top_w.launch()

    sides = {
        "decoder": Timed(model.step, model.nbytes, f"{model.layers} of {model.wanted} layers"),
        "decoder and Top-W": Timed(both, model.nbytes),
        "what Top-W adds": Timed(("decoder and Top-W", "decoder"), note="round by round"),
        "Top-W alone": Timed(top_w.launch, model.logits.nbytes),
    }
    rate, times = _measured(job, kernel.device, sides, min(_DECODER_STEPS, sizes.steps))
    taken = times.microseconds
    share = Spread.of([a / b for a, b in zip(taken["what Top-W adds"], taken["decoder"], strict=True)])
    found = _result(job, f"{model.nbytes / 1e9:.1f} GB of float16 matrices, one token", rate, times)
    text = f"{found.table}\n\nTop-W adds {share.format(100)} % to the decode step; the goal is at most 1 %."
    return replace(found, table=text, data=found.data | {"share": [share.low, share.median, share.high]})


def _measured(job: Job, device: torch.device, sides: dict[str, Timed], steps: int | None = None) -> tuple[float, Times]:
    """Returns (memory bandwidth in bytes per second, times)."""
    from benchmarks.gpu.measure import bandwidth, measure_sides

    sizes = sizes_of(job)
    return bandwidth(device), measure_sides(sides, min(job.rounds, sizes.rounds), steps or sizes.steps, device)


def _result(job: Job, what: str, rate: float, times: Times) -> Result:
    said = "REHEARSAL, no GPU: " if job.rehearse else ""
    text = f"{said}{what}; reading memory: {rate / 1e9:,.0f} GB/s.\n\n{times.table(rate)}"
    return Result({"rehearsal": job.rehearse, "bytes a second": rate, "sides": times.data()}, text)

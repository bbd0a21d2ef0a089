"""The part `speed`: step times in a CUDA graph, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.common import Spread
from benchmarks.gpu.device import BoundStep, DeviceKernel, open_kernel, random_rows, table_of
from benchmarks.gpu.job import Job, Result, Sizes, Step, StepError, sizes_of
from benchmarks.gpu.measure import Side, Timed, Times, bandwidth, measure_sides, rotate_launches
from benchmarks.gpu.small_rows import UNCERTIFIED
from tests.support.cuda_kernel import CERTIFY, GEOMETRY
from tests.support.kernel import STAGES, Edits, KernelSamples
from topw_deploy.sampling import pack_mask
from topw_deploy.sampling.parameters import TopWOptions
from topw_lab.bench.logits import bell_logits, likely_logits

_METRICS = ("cosine", "mahalanobis")
GOALS = {1: 8.0, 64: 20.0}
"""Goal for a step of certified float32 rows on an H200, in microseconds, by batch."""

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_OPTIONS = TopWOptions(metric="uniform")
_EDITS = 16
_COLUMNS = {"uniform": 0.37}
_MASKS = {"all tokens": 1.0, "half of them": 0.5, "one in 500": 0.002}
OPEN_GOALS = {1: 60.0}
"""Goal for a step of open rows on an H200, in microseconds, by batch."""
_DECODER_OPTIONS = TopWOptions(metric="cosine")
_SHARE = 0.7  # share of free memory used for weights
_SCALE = 0.01
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

    sizes, kernel = sizes_of(job), open_kernel(job)
    logits = logits_on(kernel.device, batch, sizes.vocab)
    sides = top_w_sides(kernel, logits, sizes)
    sides |= torch_sides(logits, sizes.top_m)
    return _result(job, f"{sizes.vocab:,} tokens, batch {batch}", *_measured(job, kernel.device, sides))


def open_rows(job: Job, metric: str, batch: int) -> Result:
    """Time open rows at the shipped size, with and without neighbour bounds."""

    sizes, kernel = sizes_of(job), open_kernel(job)
    table = random_rows(sizes.vocab, sizes.hidden, kernel.device)
    options = TopWOptions(metric=metric, top_m=sizes.top_m)
    drawn = np.concatenate([bell_logits(sizes.vocab, 1, seed) for seed in range(batch)])
    logits = torch.from_numpy(drawn).to(kernel.device)
    pool = logits.topk(sizes.top_m, 1).indices.unique()
    moved = logits.nbytes + len(pool) * table[0].nbytes
    sides = {}
    for name, bounded in (("no bound", None), ("nearest neighbours bounded", pool)):
        step = BoundStep(kernel, logits, UNCERTIFIED | _COLUMNS, options, table_of(table, metric, bounded))
        step.launch()
        note = describe_work(step.samples())
        sides[f"Top-W, {metric}, {name}"] = Timed(step.launch, moved, note, goal=OPEN_GOALS.get(batch))
    sides["torch.topk of the pool's size"] = Timed(lambda: logits.topk(sizes.top_m, 1), logits.nbytes)
    what = f"{sizes.vocab:,} tokens, d = {sizes.hidden:,} in float16, {metric}, batch {batch}"
    return _result(job, what, *_measured(job, kernel.device, sides))


def decode_step(job: Job) -> Result:
    """Time a captured decode step with Top-W, minus the step without it."""

    sizes, kernel = sizes_of(job), open_kernel(job)
    model = random_decoder(kernel.device, sizes.decoder)
    model.step()
    rows = random_rows(model.logits.shape[1], sizes.decoder[0], kernel.device)
    table = table_of(rows, _DECODER_OPTIONS.metric)
    top_w = BoundStep(kernel, model.logits, _COLUMNS, _DECODER_OPTIONS, table, reports=False)
    top_w.launch()
    if not top_w.samples().certified.all():
        raise StepError("the decoder's row is not certified, so this measures another case.")

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

    sizes = sizes_of(job)
    return bandwidth(device), measure_sides(sides, min(job.rounds, sizes.rounds), steps or sizes.steps, device)


def _result(job: Job, what: str, rate: float, times: Times) -> Result:
    said = "REHEARSAL, no GPU: " if job.rehearse else ""
    text = f"{said}{what}; reading memory: {rate / 1e9:,.0f} GB/s.\n\n{times.table(rate)}"
    return Result({"rehearsal": job.rehearse, "bytes a second": rate, "sides": times.data()}, text)


def logits_on(device: torch.device, batch: int, vocab: int) -> torch.Tensor:
    """float32 [batch, vocab]: `likely_logits`, different per row."""
    return torch.from_numpy(np.concatenate([likely_logits(vocab, seed=row) for row in range(batch)])).to(device)


def top_w_sides(kernel: DeviceKernel, logits: torch.Tensor, sizes: Sizes) -> dict[str, Timed]:
    """Top-W for each logits type, for each launch alone, and with more inputs and outputs."""
    batch = len(logits)
    sides: dict[str, Timed] = {}
    for dtype in _TYPES:
        rows, name = logits.to(dtype), str(dtype).removeprefix("torch.")
        step = certified_step(kernel, rows)
        goal = GOALS.get(batch) if dtype == torch.float32 else None
        sides[f"Top-W, {name}"] = Timed(step.launch, rows.nbytes, "logits warm", goal=goal)
        cold, copies = cold_side(kernel, step, sizes.cold)
        sides[f"Top-W, {name}, cold"] = Timed(cold, rows.nbytes, f"{copies} logits in turn", copies)
    step, least = certified_step(kernel, logits), logits.nbytes
    sides["certify alone"] = Timed(lambda: step.launch(CERTIFY), least)
    sides["geometry alone, no row open"] = Timed(lambda: step.launch(GEOMETRY))
    sides["Top-W with mass"] = Timed(certified_step(kernel, logits, mass=True).launch, least)
    sides[f"Top-W with {_EDITS} edits a row"] = Timed(certified_step(kernel, logits, edits_of(logits)).launch, least)
    masked = certified_step(kernel, logits, keep_mask=True)
    for name, share in _MASKS.items():
        call = certified_step(kernel, logits, allowed=mask_of(logits, share))
        sides[f"Top-W with a mask of {name}"] = Timed(call.launch, least + call.allowed.nbytes)
    sides["Top-W with keep_mask"] = Timed(masked.launch, least + logits.numel())
    flush = torch.empty(sizes.cold, dtype=torch.uint8, device=logits.device)
    writing, then = "writing a buffer larger than the cache", "the same, then Top-W, float32"
    sides[writing] = Timed(lambda: flush.fill_(1), flush.nbytes)

    def after_a_flush() -> None:
        flush.fill_(1)
        step.launch()

    sides[then] = Timed(after_a_flush, flush.nbytes + least)
    sides["Top-W, float32, all memory cold"] = Timed((then, writing), least, "with the writing less the writing")
    return sides


def certified_step(
    kernel: DeviceKernel, logits: torch.Tensor, edits: Edits | None = None, *, allowed: np.ndarray | None = None,
    mass: bool = False, keep_mask: bool = False, memory: BoundStep | None = None,
) -> BoundStep:  # fmt: skip
    """Raises StepError if a row is not certified."""
    step = BoundStep(kernel, logits, _COLUMNS, _OPTIONS, None, edits, allowed=allowed, mass=mass, keep_mask=keep_mask,
                reports=False, memory=memory)  # fmt: skip
    step.launch()
    open_rows = int((~step.samples().certified).sum())
    if open_rows:
        raise StepError(f"{open_rows} of {len(logits)} rows are not certified, so this measures another case.")
    return step


def cold_side(kernel: DeviceKernel, step: BoundStep, cold: int) -> tuple[Side, int]:
    """Returns (the step over copies of its logits that together exceed the cache, number of copies)."""
    copies = max(2, math.ceil(cold / step.logits.nbytes))
    others = [certified_step(kernel, step.logits.clone(), memory=step) for _ in range(copies)]
    return rotate_launches([other.launch for other in others]), copies


def edits_of(logits: torch.Tensor) -> Edits:
    """Penalties and biases that leave the rows certified."""
    ids = logits.topk(_EDITS, 1).indices.cpu().numpy().astype(np.int64)
    penalty, bias = np.full(ids.shape, 1.05, np.float32), np.zeros(ids.shape, np.float32)
    bias[:, ::2] = 0.1
    return ids, penalty, bias


def mask_of(logits: torch.Tensor, share: float) -> np.ndarray:
    """int32 [B, ceil(V / 32)]: a random share of the tokens and the likely ones, so that rows stay certified."""
    allowed = np.random.default_rng(7).random(tuple(logits.shape)) < share
    np.put_along_axis(allowed, logits.topk(_EDITS, 1).indices.cpu().numpy(), np.True_, axis=1)
    return pack_mask(allowed)


def torch_sides(logits: torch.Tensor, top_k: int) -> dict[str, Timed]:
    """torch operations over the same rows."""
    operations: dict[str, Callable[[], object]] = {
        "torch.max": lambda: logits.amax(1),
        "torch.argmax": lambda: logits.argmax(1),
        f"torch.topk({top_k})": lambda: logits.topk(top_k, 1),
        "torch.softmax": lambda: logits.softmax(1),
    }
    return {name: Timed(side, logits.nbytes) for name, side in operations.items()}


def describe_work(samples: KernelSamples) -> str:
    """A sentence on the work of the rows. Raises StepError for a row that needed no distances."""
    reports = samples.reports
    stages = {STAGES[int(stage)] for stage in reports["stage"]}
    if stages != {"geometry"}:
        raise StepError(f"rows were answered by {', '.join(sorted(stages))}, so this does not measure geometry.")
    kept, steps = (np.median(values) for values in (samples.kept, reports["steps"]))
    return (
        f"keeps {kept:g}, {steps:g} steps, {np.median(reports['distances']):,.0f} distances, "
        f"{np.median(reports['distances_avoided']):,.0f} avoided"
    )


@dataclass(frozen=True)
class Decoder:
    """logits [1, V]: the last matmul's output. layers: how many of the `wanted` layers fit into memory."""

    step: Side
    logits: torch.Tensor
    layers: int
    wanted: int
    nbytes: int


def random_decoder(device: torch.device, sizes: tuple[int, int, int, int, int]) -> Decoder:
    """sizes: hidden, inner, kv, layers, vocab.

    The head makes the logits certified, like nearly all of a language model's.
    """
    hidden, inner, kv, wanted, vocab = sizes
    shapes = [(hidden, hidden + 2 * kv), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    layer_bytes = 2 * sum(a * b for a, b in shapes)
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 1 << 30
    layers = max(1, min(wanted, int((_SHARE * free - 6 * hidden * vocab) // layer_bytes)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float16, device=device)

    weights = [[random(*shape) * _SCALE for shape in shapes] for _ in range(layers)]
    inputs = {size: random(1, size) for size in (hidden, inner)}
    state, head = inputs[hidden].float(), random(hidden, vocab) * _SCALE
    missing = logits_on(device, 1, vocab) - state @ head.float()
    head = (head.float() + state.T @ missing / state.square().sum()).half()
    logits = torch.empty((1, vocab), dtype=torch.float16, device=device)

    def step() -> None:
        for layer in weights:
            for matrix in layer:
                inputs[matrix.shape[0]] @ matrix
        torch.matmul(inputs[hidden], head, out=logits)

    return Decoder(step, logits, layers, wanted, layers * layer_bytes + head.nbytes)

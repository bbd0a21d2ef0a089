"""The part `capture`: CUDA graphs in every capture mode, after a matmul, and on two streams."""

from __future__ import annotations

import contextlib

import torch

from benchmarks.gpu.device import DeviceKernel, DeviceTable, open_kernel
from benchmarks.gpu.job import Job, Result, Step, sizes_of
from benchmarks.gpu.measure import capture_graph, synchronize
from benchmarks.gpu.rows import are_equal, load_rows, mixed_step, random_table_on

_MODES = ("global", "thread_local", "relaxed")


def steps(job: Job) -> list[Step]:
    return [
        Step("every mode", modes, 20, 120),
        Step("behind a matrix product", behind_a_product, 15, 120),
        Step("two streams", two_streams, 15, 120),
        Step("replays", replays, 30, 180),
    ]


def _opened(job: Job) -> tuple[DeviceKernel, DeviceTable]:

    kernel = open_kernel(job)
    return kernel, random_table_on(kernel, sizes_of(job).small_vocab, sizes_of(job).small_hidden)


def modes(job: Job) -> Result:
    """Capture a step in each mode; replays on other rows must equal launches."""

    kernel, table = _opened(job)
    batch, others = sizes_of(job).captured
    unequal = 0
    for mode in _MODES:
        step = mixed_step(kernel, batch, 4, table)
        graph = capture_graph(step.launch, 1, kernel.device, mode)
        for seed in range(5, 5 + others):
            load_rows(step, seed)
            graph.replay()
            replayed = step.samples()
            fresh = mixed_step(kernel, batch, seed, table)
            fresh.launch()
            unequal += not are_equal(fresh.samples(), replayed)
    return _result(unequal, len(_MODES) * others, f"replays of graphs captured as {', '.join(_MODES)} equal launches")


def behind_a_product(job: Job) -> Result:
    """Capture a step and the matmul before it."""

    kernel, table = _opened(job)
    (batch, others), hidden, vocab = sizes_of(job).captured, 64, table.structure.tokens
    generator = torch.Generator(kernel.device).manual_seed(2)
    head = torch.randn((hidden, vocab), device=kernel.device, generator=generator) * 0.2
    states = torch.zeros((batch, hidden), device=kernel.device)
    step, fresh = (mixed_step(kernel, batch, 4, table) for _ in range(2))

    def both() -> None:
        torch.matmul(states, head, out=step.logits)
        step.launch()

    graph = capture_graph(both, 1, kernel.device)
    unequal = 0
    for _ in range(others):
        states.copy_(torch.randn(states.shape, device=kernel.device, generator=generator))
        graph.replay()
        replayed = step.samples()
        fresh.logits.copy_(step.logits)
        fresh.launch()
        unequal += not are_equal(fresh.samples(), replayed)
    return _result(unequal, others, "replays equal launches")


def two_streams(job: Job) -> Result:
    """Run two steps concurrently; answers must not change."""

    kernel, table = _opened(job)
    on_gpu, least = kernel.device.type == "cuda", sizes_of(job).captured[0]
    steps = [mixed_step(kernel, batch, seed, table) for seed, batch in ((11, least), (12, 2 * least))]
    alone = []
    for step in steps:
        step.launch()
        alone.append(step.samples())
    streams = [torch.cuda.Stream() if on_gpu else None for _ in steps]
    times = 2 if job.rehearse else 100
    unequal = 0
    for _ in range(times):
        synchronize(kernel.device)
        for _ in range(1 if job.rehearse else 5):
            for step, stream in zip(steps, streams, strict=True):
                with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                    step.launch()
        unequal += not all(are_equal(step.samples(), wanted) for step, wanted in zip(steps, alone, strict=True))
    return _result(unequal, times, "times two streams give the answers of one")


def replays(job: Job) -> Result:
    """Replay a graph of certified and open rows; answers must not change."""

    kernel, table = _opened(job)
    times = sizes_of(job).replays
    step = mixed_step(kernel, sizes_of(job).captured[0], 6, table)
    graph = capture_graph(step.launch, 1, kernel.device)
    graph.replay()
    first, unequal = step.samples(), 0
    for _ in range(times):
        graph.replay()
        unequal += not are_equal(first, step.samples())
    return _result(unequal, times, "replays are bitwise equal to the first")


def _result(unequal: int, of: int, what: str) -> Result:
    """what: such as "replays equal launches"; the result fails if it does not hold every time."""
    text = f"{of - unequal} of {of} {what}"
    return Result({"times": of, "unequal": unequal}, text, f"only {text}." if unequal else "")

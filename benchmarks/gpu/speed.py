"""What a step costs on a GPU: inside a CUDA graph, beside torch's and FlashInfer's own steps over the same logits.

A side is a function that enqueues work. Its step is captured many times into one graph, and a replay is timed by
events, so neither Python nor the host's launches count. Sides take turns; medians of ratios within a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common import Spread, interleave, ratio, table
from benchmarks.gpu.device import DeviceTable, Step
from topw_deploy.bench.sampler.problem import likely_logits
from topw_deploy.plugins.cuda_kernel import CudaKernel
from topw_deploy.plugins.kernel import STAGES, KernelTable
from topw_deploy.sampling import Geometry
from topw_deploy.sampling.parameters import TopWOptions

VOCAB, HIDDEN = 151_936, 2_048
STEPS = 20  # in one graph
UNCERTIFIED = {"lam": 1.0, "init_top_p": 0.5, "temperature": 2.0, "geom_scale": 0.6}
COLD_BYTES = 256 << 20  # more than any GPU's cache
Side = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Microseconds of one step by side, and what each kept or did."""

    microseconds: dict[str, list[float]]
    notes: dict[str, str]


def captured(side: Side, steps: int = STEPS) -> torch.cuda.CUDAGraph:
    """`steps` calls of `side` in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            side()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            side()
    return graph


def replay_microseconds(graph: torch.cuda.CUDAGraph, steps: int = STEPS) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / steps


def measure(sides: dict[str, Side], rounds: int, notes: dict[str, str] | None = None) -> Measured:
    """Every side in turn, `rounds` times."""
    graphs = {name: captured(side) for name, side in sides.items()}
    timed = {name: (lambda graph=graph: replay_microseconds(graph)) for name, graph in graphs.items()}
    return Measured(interleave(timed, rounds, warmup=5), notes or {})


def rotating(launches: list[Side]) -> Side:
    """Enqueues the next of `launches` each time, so that a capture walks over all of their logits."""
    state = {"next": 0}

    def one() -> None:
        launches[state["next"] % len(launches)]()
        state["next"] += 1

    return one


def logits_on(device: torch.device, batch: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """[batch, VOCAB]: a language model's in shape, another one in each row."""
    rows = np.concatenate([likely_logits(VOCAB, seed=seed + row) for row in range(batch)])
    return torch.from_numpy(rows).to(device=device, dtype=dtype)


def certified_sides(kernel: CudaKernel, device: torch.device, batch: int) -> tuple[dict[str, Side], dict[str, str]]:
    """Top-W over certified rows of each type of logits, and other samplers over the same."""
    options, logits = TopWOptions(metric="uniform"), logits_on(device, batch)
    sides: dict[str, Side] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        step = Step(kernel, logits.to(dtype), {"uniform": 0.37}, options, reports=False)
        sides[f"Top-W, {str(dtype).removeprefix('torch.')}"] = step.launch
    if STEPS * logits.nbytes >= COLD_BYTES:  # fewer are in the cache again when the graph comes round to them
        cold = [logits.clone() for _ in range(STEPS)]
        launches = [Step(kernel, rows, {"uniform": 0.37}, options, reports=False).launch for rows in cold]
        sides["Top-W, float32, logits not in the cache"] = rotating(launches)
    sides["Top-W with mass"] = Step(kernel, logits, {"uniform": 0.37}, options, mass=True, reports=False).launch
    sides["torch.max"] = lambda: logits.amax(1)
    sides["torch.argmax"] = lambda: logits.argmax(1)
    sides["torch.topk(1200)"] = lambda: logits.topk(1200)
    sides["torch.softmax"] = lambda: logits.softmax(1)
    return sides | flashinfer_sides(logits), {}


def flashinfer_sides(logits: torch.Tensor) -> dict[str, Side]:
    """FlashInfer's samplers where the package is installed."""
    try:
        from flashinfer.sampling import top_k_top_p_sampling_from_logits, top_p_sampling_from_probs
    except ImportError:
        return {}
    probabilities = logits.softmax(1)
    return {
        "FlashInfer top-p 0.95, of probabilities": lambda: top_p_sampling_from_probs(probabilities, 0.95),
        "FlashInfer top-k 50, top-p 0.95, of logits": lambda: top_k_top_p_sampling_from_logits(logits, 50, 0.95),
    }


def geometry_table(device: torch.device, metric: str) -> tuple[TopWOptions, DeviceTable]:
    """A random table [32,000, HIDDEN] in float16 and the options that go with it."""
    rows = np.random.default_rng(1).standard_normal((32_000, HIDDEN), dtype=np.float32).astype(np.float16)
    geometry = Geometry.from_embeddings(rows, metric)
    return TopWOptions(metric=metric), DeviceTable(KernelTable.from_geometry(geometry), device)


def uncertified_sides(kernel: CudaKernel, device: torch.device, batch: int) -> tuple[dict[str, Side], dict[str, str]]:
    """Top-W over rows whose crop geometry decides; notes say what it took."""
    bell = np.random.default_rng(0).standard_normal((batch, 32_000)).astype(np.float32) * 1.6
    logits = torch.from_numpy(bell).to(device)
    sides: dict[str, Side] = {}
    notes = {}
    for metric in ("mahalanobis", "cosine"):
        options, rows = geometry_table(device, metric)
        step = Step(kernel, logits, UNCERTIFIED | {"uniform": 0.37}, options, rows)
        step.launch()
        samples = step.samples()
        name = f"Top-W, {metric}, d = {HIDDEN}"
        report = samples.reports[0]
        notes[name] = (
            f"{STAGES[report['stage']]}, keeps {samples.kept[0]}, {report['steps']} steps, "
            f"{report['distances']:,} distances"
        )
        sides[name] = step.launch
    sides["torch.topk(1200)"] = lambda: logits.topk(1200)
    return sides, notes


def bandwidth(device: torch.device) -> float:
    """Bytes a second that reading a gigabyte reaches."""
    block = torch.zeros(1 << 28, dtype=torch.float32, device=device)
    graph = captured(lambda: block.sum(), 5)
    best = min(replay_microseconds(graph, 5) for _ in range(10))
    return float(block.nbytes / best * 1e6)


def model_step_sides(kernel: CudaKernel, device: torch.device) -> dict[str, Side]:
    """The matrices of a decoder of 3 B parameters in float16 (Llama-3.2-3B's sizes) for one token, and with Top-W."""
    hidden, inner, kv, layers, vocab = 3072, 8192, 1024, 28, 128_256
    sizes = [(hidden, hidden + 2 * kv), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    weights = [[torch.randn(*size, dtype=torch.float16, device=device) * 0.01 for size in sizes] for _ in range(layers)]
    head = torch.randn(hidden, vocab, dtype=torch.float16, device=device) * 0.01
    x = {size: torch.randn(1, size, dtype=torch.float16, device=device) for size in (hidden, inner)}
    logits = logits_on(device, 1, torch.float16)[:, :vocab].contiguous()
    step = Step(kernel, logits, {"uniform": 0.37}, TopWOptions(metric="uniform"), reports=False)

    def decoder() -> None:
        for layer in weights:
            for matrix in layer:
                x[matrix.shape[0]] @ matrix
        torch.matmul(x[hidden], head, out=logits)

    def with_top_w() -> None:
        decoder()
        step.launch()

    return {"decoder": decoder, "decoder and Top-W": with_top_w, "Top-W": step.launch}


def lines(measured: Measured, batch: int, floor: float | None = None) -> str:
    """A markdown table: microseconds, ratio to the first side, distance to the memory floor where that is known."""
    first = next(iter(measured.microseconds))
    rows = []
    for name, values in measured.microseconds.items():
        cells = [name, Spread.of(values).format(digits=1), ratio(measured.microseconds, name, first).format()]
        if floor is not None:
            cells.append(f"{Spread.of(values).median / floor:.1f}")
        rows.append((*cells, measured.notes.get(name, "")))
    head = ["side", "us", f"to {first}", *(["to reading the logits once"] if floor is not None else []), ""]
    return f"batch {batch}:\n\n" + table(tuple(head), rows)

"""A float16 decode step of Llama-3.2-3B's sizes, for `speed`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.certified import logits_on
from benchmarks.gpu.device import DeviceKernel, Step
from benchmarks.gpu.graphs import Side
from benchmarks.gpu.tables import random_rows, table_of
from topw_deploy.sampling.parameters import TopWOptions

_OPTIONS = TopWOptions(metric="cosine")
_SHARE = 0.7  # share of free memory used for weights
_SCALE = 0.01


@dataclass(frozen=True)
class Decoder:
    """logits [1, V]: the last matmul's output. layers: how many of the `wanted` layers fit into memory."""

    step: Side
    logits: torch.Tensor
    layers: int
    wanted: int
    nbytes: int


def decoder(device: torch.device, sizes: tuple[int, int, int, int, int]) -> Decoder:
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


def sampler(kernel: DeviceKernel, logits: torch.Tensor, hidden: int) -> Step:
    """Top-W over the logits, with a table of the embeddings' size."""
    table = table_of(random_rows(logits.shape[1], hidden, logits.device), _OPTIONS.metric)
    return Step(kernel, logits, {"uniform": 0.37}, _OPTIONS, table, reports=False)

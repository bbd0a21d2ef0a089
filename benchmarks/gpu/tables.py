"""Random embedding tables in device memory, with statistics and bounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.device import DeviceTable
from topw_deploy.sampling.geometry import VARIANCE_ADDED, VARIANCE_FLOOR

_BLOCK = 8_192  # rows per pass
_SLACK = 1e-3  # relative: far above float32's error on random points


def random_rows(vocab: int, hidden: int, device: torch.device) -> torch.Tensor:
    """float16 [vocab, hidden], normal, fixed seed."""
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.empty((vocab, hidden), dtype=torch.float16, device=device)
    for start in range(0, vocab, _BLOCK):
        block = rows[start : start + _BLOCK]
        block.copy_(torch.randn(block.shape, device=device, generator=generator))
    return rows


def statistics(rows: torch.Tensor, metric: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 mean and inverse standard deviation [d], as by `sampling.embedding_statistics`."""
    count = len(rows)
    zero = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    mean = sum((block.sum(0) for block in _blocks(rows, metric)), zero) / count
    variance = sum(((block - mean).square().sum(0) for block in _blocks(rows, metric)), zero) / count
    added = variance + VARIANCE_ADDED if metric == "mahalanobis" else variance.clamp(min=VARIANCE_FLOOR)
    return mean.float(), added.rsqrt().float()


def _blocks(rows: torch.Tensor, metric: str) -> Iterator[torch.Tensor]:
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK].double()
        yield torch.nn.functional.normalize(block, dim=1) if metric == "mahalanobis" else block


def table_of(rows: torch.Tensor, metric: str, bounded: torch.Tensor | None = None) -> DeviceTable:
    """Make the table of `rows` with its statistics.

    bounded: token ids that get neighbour bounds; None for no bounds.
    """
    mean, inverse_std = statistics(rows, metric)
    bound = None if bounded is None else nearest_bound(rows, metric, mean, inverse_std, bounded)
    return DeviceTable.of_tensors(rows, mean, inverse_std, bound)


def nearest_bound(
    rows: torch.Tensor, metric: str, mean: torch.Tensor, inverse_std: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float32 [V]: lower bounds of the nearest-neighbour distances of the tokens `ids`; 0 for all others."""

    def points(block: torch.Tensor) -> torch.Tensor:
        if metric == "mahalanobis":
            return (torch.nn.functional.normalize(block.float(), dim=1) - mean) * inverse_std
        return torch.nn.functional.normalize((block.float() - mean) * inverse_std, dim=1)

    bound = torch.zeros(len(rows), device=rows.device)
    for some in ids.split(_BLOCK):
        mine = points(rows[some])  # [n, d]
        nearest = torch.full((len(some),), torch.inf, device=rows.device)
        for start in range(0, len(rows), _BLOCK):
            others = points(rows[start : start + _BLOCK])
            found = 1 - mine @ others.T if metric == "cosine" else torch.cdist(mine, others)
            within = (some >= start) & (some < start + len(others))
            found[within.nonzero().flatten(), some[within] - start] = torch.inf
            nearest = torch.minimum(nearest, found.amin(1))
        bound[some] = torch.where(nearest > _SLACK, nearest * (1 - _SLACK), 0)
    return bound

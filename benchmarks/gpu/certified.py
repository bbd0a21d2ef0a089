"""The sides that the part `speed` times on certified rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu.device import DeviceKernel, Edits, Step
from benchmarks.gpu.graphs import Side
from benchmarks.gpu.measure import Timed, rotate_launches, zeroing_side
from benchmarks.gpu.sizes import Sizes
from tests.support.cuda_kernel import CERTIFY, GEOMETRY
from topw_deploy.sampling import pack_mask
from topw_deploy.sampling.parameters import TopWOptions
from topw_lab.bench.logits import likely_logits

GOALS = {1: 8.0, 64: 20.0}
"""Goal for a step of certified float32 rows on an H200, in microseconds, by batch."""

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_OPTIONS = TopWOptions(metric="uniform")
_EDITS = 16
_COLUMNS = {"uniform": 0.37}
_MASKS = {"all tokens": 1.0, "half of them": 0.5, "one in 500": 0.002}


class NotCertifiedError(Exception):
    """A row is not certified, which invalidates the measurement."""


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
    sides["memset of the control bytes"] = Timed(zeroing_side(step.control), note=f"{step.control.nbytes:,} bytes")
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
    mass: bool = False, keep_mask: bool = False, memory: Step | None = None,
) -> Step:  # fmt: skip
    """Raises NotCertifiedError if a row is not certified."""
    step = Step(kernel, logits, _COLUMNS, _OPTIONS, None, edits, allowed=allowed, mass=mass, keep_mask=keep_mask,
                reports=False, memory=memory)  # fmt: skip
    step.launch()
    open_rows = int((~step.samples().certified).sum())
    if open_rows:
        raise NotCertifiedError(f"{open_rows} of {len(logits)} rows are not certified, so this measures another case.")
    return step


def cold_side(kernel: DeviceKernel, step: Step, cold: int) -> tuple[Side, int]:
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

"""FlashInfer's samplers, if installed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.graphs import capture_graph
from benchmarks.gpu.measure import Timed


def why_absent() -> str:
    """Why FlashInfer cannot be measured; empty if it can."""
    try:
        import flashinfer.sampling  # noqa: F401
    except ImportError as error:
        return f"FlashInfer is not here ({error}), so its samplers were not measured"
    return ""


def sides(logits: torch.Tensor) -> dict[str, Timed]:
    """FlashInfer's samplers by name; those that cannot be captured have a note."""
    from flashinfer.sampling import top_k_top_p_sampling_from_logits, top_p_sampling_from_probs

    probabilities = logits.softmax(1)
    samplers: dict[str, Callable[[], object]] = {
        "FlashInfer top-p 0.95, of probabilities": lambda: top_p_sampling_from_probs(probabilities, 0.95),
        "FlashInfer top-k 50, top-p 0.95, of logits": lambda: top_k_top_p_sampling_from_logits(logits, 50, 0.95),
    }
    return {name: _timed_side(side, logits) for name, side in samplers.items()}


def _timed_side(side: Callable[[], object], logits: torch.Tensor) -> Timed:
    try:
        capture_graph(side, 1, logits.device).replay()
    except RuntimeError as error:
        words = " ".join(str(error).split())[:120]
        return Timed(side, logits.nbytes, f"launched, not captured: {words}", launched=True)
    return Timed(side, logits.nbytes)

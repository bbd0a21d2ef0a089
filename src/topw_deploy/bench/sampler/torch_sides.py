"""Sides that are logits processors of PyTorch: scores in, scores with everything outside the crop at -inf out.

Only the processor is timed. What `generate` does after it (softmax, multinomial) is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from topw_deploy.bench.authors import load_processor
from topw_deploy.bench.sampler.catalogue import MIN_P, TOP_K, TOP_P
from topw_deploy.bench.sampler.problem import TABLE, Case, Logits, Problem
from topw_deploy.bench.sampler.side import Call
from topw_deploy.errors import BenchmarkError

Processor = Callable[[Any, torch.Tensor], torch.Tensor]


class TorchSide:
    """`crop_rows` on the CPU, all rows at once."""

    def __init__(self, problem: Problem) -> None:
        from topw_deploy.sampling.torch import TensorGeometry

        self._options, bound = problem.options, problem.neighbour_bound
        self._bound = None if bound is None else torch.from_numpy(bound)
        self._geometry = None
        if problem.embeddings is not None:
            table = torch.from_file(str(problem.folder / TABLE), size=problem.embeddings.size).view(
                problem.embeddings.shape
            )
            self._geometry = TensorGeometry.from_embeddings(table, problem.options.metric)

    def step(self, case: Case, logits: Logits) -> Call:
        scores = torch.from_numpy(logits)
        return lambda: self._crop(scores, case).keep_mask

    def kept(self, case: Case, logits: Logits) -> Sequence[ArrayLike]:
        mask = self._crop(torch.from_numpy(logits), case).keep_mask
        return [np.flatnonzero(row) for row in mask.numpy()]

    def _crop(self, scores: torch.Tensor, case: Case) -> Any:
        from topw_deploy.sampling.torch import crop_rows

        return crop_rows(scores, case.parameters, self._options, self._geometry, neighbour_bound=self._bound)


class WarperSide:
    """A warper of transformers over logits divided by the temperature, as `generate` orders them."""

    def __init__(self, rule: str) -> None:
        from transformers.generation import logits_process as rules

        self._warp: Processor = {
            "top-p": lambda: rules.TopPLogitsWarper(TOP_P),
            "top-k": lambda: rules.TopKLogitsWarper(TOP_K),
            "min-p": lambda: rules.MinPLogitsWarper(MIN_P),
        }[rule]()

    def step(self, case: Case, logits: Logits) -> Call:
        scores = torch.from_numpy(logits) / max(case.parameters.temperature, 1e-5)
        return lambda: self._warp(None, scores)

    def kept(self, case: Case, logits: Logits) -> None:
        return None


class AuthorsSide:
    """The processor of arashgholami/top-w-decoding, from the user's copy, with the same parameters as ours.

    It measures distance by its cosine whatever the metric here, and takes one row at a time.
    """

    def __init__(self, problem: Problem) -> None:
        if problem.embeddings is None:
            raise BenchmarkError("authors needs embeddings, but the metric is uniform; choose another --metric.")
        if problem.authors is None:
            raise BenchmarkError("authors needs its file: give --authors.")
        self._options, self._class = problem.options, load_processor(problem.authors)
        self._embeddings = np.asarray(problem.embeddings)
        self._latest: Any = None

    def step(self, case: Case, logits: Logits) -> Call:
        processor, rows = self._processor(case), [torch.from_numpy(row[None]) for row in logits]
        return lambda: [processor(None, row) for row in rows]

    def kept(self, case: Case, logits: Logits) -> Sequence[ArrayLike]:
        processor = self._processor(case)
        masked = [processor(None, torch.from_numpy(row[None]))[0].numpy() for row in logits]
        return [np.flatnonzero(np.isfinite(row)) for row in masked]

    def _processor(self, case: Case) -> Processor:
        """One for the case; its first copy's statistics serve the later ones, as they take passes over the table."""
        p = case.parameters
        chosen = {
            "selection_temperature": p.selection_temperature or p.temperature,
            "top_m": self._options.top_m,
            "init_top_p": p.init_top_p,
            "alt_iters": self._options.alt_iters,
            "geom_scale": p.geom_scale,
            "lam_fixed": p.lam,
            "beta": p.beta,
        }
        if self._latest is None:
            self._latest = self._class(self._embeddings, print_params=False, print_kept=False, **chosen)
        for name, value in chosen.items():
            setattr(self._latest, name, value)
        return self._latest  # type: ignore[no-any-return]

"""The samplers of PyTorch: logits processors, which set scores outside the crop to -inf.

Only the processors are timed, because the rest of `generate` is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from topw_deploy.errors import BenchmarkError
from topw_lab.bench.sampler.inputs import TABLE_FILE, Case, Logits, SamplerInputs
from topw_lab.bench.sampler.samplers import Call, ids_of_mask
from topw_lab.bench.sides import MIN_P, TOP_K, TOP_P, load_processor

Processor = Callable[[Any, torch.Tensor], torch.Tensor]


class TorchSampler:
    """Top-W in PyTorch: `crop_rows` on the CPU, for all rows at once."""

    def __init__(self, inputs: SamplerInputs) -> None:
        from topw_deploy.sampling.torch import TensorGeometry

        self._options = inputs.options
        self._geometry = None
        if inputs.embeddings is not None:
            table = torch.from_file(str(inputs.folder / TABLE_FILE), size=inputs.embeddings.size).view(
                inputs.embeddings.shape
            )
            self._geometry = TensorGeometry.from_embeddings(table, inputs.options.metric)

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        scores = torch.from_numpy(logits)
        return lambda: self._crop(scores, case).keep_mask

    def kept_ids(self, case: Case, logits: Logits) -> Sequence[ArrayLike] | None:
        return ids_of_mask(self._crop(torch.from_numpy(logits), case).keep_mask.numpy())

    def _crop(self, scores: torch.Tensor, case: Case) -> Any:
        from topw_deploy.sampling.torch import crop_rows

        return crop_rows(scores, case.parameters, self._options, self._geometry)


class TransformersWarper:
    """A warper of transformers, on logits divided by the temperature as in `generate`.

    rule: "top-p", "top-k" or "min-p".
    """

    def __init__(self, rule: str) -> None:
        from transformers.generation import logits_process as rules

        self._warp: Processor = {
            "top-p": lambda: rules.TopPLogitsWarper(TOP_P),
            "top-k": lambda: rules.TopKLogitsWarper(TOP_K),
            "min-p": lambda: rules.MinPLogitsWarper(MIN_P),
        }[rule]()

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        scores = torch.from_numpy(logits) / max(case.parameters.temperature, 1e-5)
        return lambda: self._warp(None, scores)

    def kept_ids(self, case: Case, logits: Logits) -> None:
        return None


class AuthorsProcessor:
    """The user's copy of the logits processor of arashgholami/top-w-decoding, with the parameters of the case.

    The processor always computes cosine distances, for one row at a time.
    """

    def __init__(self, inputs: SamplerInputs) -> None:
        if inputs.embeddings is None:
            raise BenchmarkError("authors needs embeddings, but the metric is uniform; choose another --metric.")
        if inputs.authors is None:
            raise BenchmarkError("authors needs the authors' file; give it with --authors.")
        self._options, self._class = inputs.options, load_processor(inputs.authors)
        self._embeddings = np.asarray(inputs.embeddings)
        self._instance: Any = None

    def prepare_step(self, case: Case, logits: Logits) -> Call:
        processor, rows = self._processor(case), [torch.from_numpy(row[None]) for row in logits]
        return lambda: [processor(None, row) for row in rows]

    def kept_ids(self, case: Case, logits: Logits) -> Sequence[ArrayLike]:
        processor = self._processor(case)
        masked = [processor(None, torch.from_numpy(row[None]))[0].numpy() for row in logits]
        return [np.flatnonzero(np.isfinite(row)) for row in masked]

    def _processor(self, case: Case) -> Processor:
        """The processor, with the parameters of the case. There is one, because its constructor takes long."""
        ours = case.parameters
        parameters = {
            "selection_temperature": ours.selection_temperature or ours.temperature,
            "top_m": self._options.top_m,
            "init_top_p": ours.init_top_p,
            "alt_iters": self._options.alt_iters,
            "geom_scale": ours.geom_scale,
            "lam_fixed": ours.lam,
            "beta": ours.beta,
        }
        if self._instance is None:
            self._instance = self._class(self._embeddings, print_params=False, print_kept=False, **parameters)
        for name, value in parameters.items():
            setattr(self._instance, name, value)
        return self._instance  # type: ignore[no-any-return]

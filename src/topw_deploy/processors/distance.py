"""Measure a model's median distance of likely pairs, as the verification of an export does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from topw_deploy.errors import ParameterError
from topw_deploy.processors.processor import geometry_of
from topw_deploy.sampling import median_distance
from topw_deploy.sampling.likely_pairs import (
    LIKELY_TEXT_TOKENS,
    SAMPLE_TEXT,
    first_and_last_tokens,
    split_special_prefix,
)
from topw_deploy.sampling.torch import TensorGeometry


@dataclass(frozen=True)
class _HostDistances:
    """Distances of a `TensorGeometry`, computed on the CPU in float64."""

    geometry: TensorGeometry

    def distances(self, rows: ArrayLike, cols: ArrayLike) -> NDArray[np.float64]:
        x, y = (self.geometry.features(torch.as_tensor(ids)) for ids in (rows, cols))
        found: NDArray[np.float64] = self.geometry.point_distances(x, y).numpy()
        return found


@torch.no_grad()
def median_distance_of(model: Any, tokenizer: Any, metric: str = "mahalanobis") -> float:
    """The median distance of likely pairs (docs/contract/graph.md, section 2), for `geom_unit="median"`.

    Runs the model on at most two texts of up to 64 tokens.

    model: a transformers causal language model.
    tokenizer: the model's tokenizer; it must report special tokens, as those of transformers do.
    metric: one of METRICS. Under `uniform` the median is 1, and the model does not run.

    Raises ParameterError for a model without embeddings, and if no step has two likely tokens at a distance > 0.
    """
    if metric == "uniform":
        return 1.0
    geometry = geometry_of(model, metric)
    encoded = tokenizer(SAMPLE_TEXT, return_special_tokens_mask=True)
    vocab = model.get_input_embeddings().weight.shape[0]
    start, body = split_special_prefix(encoded["input_ids"], encoded["special_tokens_mask"], vocab)
    context = getattr(model.config, "max_position_embeddings", None)
    longest = LIKELY_TEXT_TOKENS if context is None else min(LIKELY_TEXT_TOKENS, context)
    rows = (row for ids in first_and_last_tokens(start, body, longest) for row in _logits_of_steps(model, ids))
    found = median_distance(_HostDistances(geometry), rows)
    if found is None:
        raise ParameterError(
            "the model has no median distance: no step has two likely tokens at a distance > 0; check the model and "
            "its tokenizer.",
            "median_distance",
        )
    return found


def _logits_of_steps(model: Any, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits [n, V] of a text's n steps."""
    tokens = torch.from_numpy(ids)[None].to(model.get_input_embeddings().weight.device)
    found: NDArray[np.float32] = model(input_ids=tokens).logits[0].float().cpu().numpy()
    return found

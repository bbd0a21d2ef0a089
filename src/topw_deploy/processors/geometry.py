"""The token geometry of a model, taken once: its statistics read the whole embedding table twice."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from topw_deploy.errors import ParameterError
from topw_deploy.sampling.torch import TensorGeometry

Source = Any
"""A transformers model, its embedding module, a table [V, d], a `TensorGeometry`, or None for the uniform metric."""

# Of every embedding module: the geometry by metric, with the state of the table that it was taken from.
_KNOWN: WeakKeyDictionary[nn.Module, dict[str, tuple[tuple[int, int], TensorGeometry]]] = WeakKeyDictionary()


def geometry_of(source: Source, metric: str) -> TensorGeometry:
    """The geometry of a model's input embeddings under `metric`; a module is asked once, until its table changes.

    Raises ParameterError for a source without embeddings, and for a geometry of another metric.
    """
    if isinstance(source, TensorGeometry):
        if source.metric != metric:
            raise ParameterError(f"the metric is {metric}, but a {source.metric} geometry was given; pass its own.")
        return source
    if metric == "uniform":
        return TensorGeometry.uniform()
    if isinstance(source, Tensor):
        return TensorGeometry.from_embeddings(source, metric)
    module = source.get_input_embeddings() if hasattr(source, "get_input_embeddings") else source
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor):
        kind = type(source).__name__
        raise ParameterError(f"the metric {metric} needs a model or its embeddings, but was given a {kind}.")
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    known = _KNOWN.setdefault(module, {})
    if metric not in known or known[metric][0] != state:
        known[metric] = (state, TensorGeometry.from_embeddings(weight, metric))
    return known[metric][1]

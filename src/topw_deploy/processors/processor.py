"""`TopWLogitsProcessor`: Top-W as a transformers logits processor."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, TypedDict, Unpack
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from topw_deploy.errors import ParameterError
from topw_deploy.processors.base import CropProcessor
from topw_deploy.sampling import (
    OPTION_NAMES,
    PARAMETER_NAMES,
    PRESETS,
    REQUEST_PRESETS,
    TopWOptions,
    TopWParameters,
    as_float32,
    preset_parameters,
    preset_values,
)
from topw_deploy.sampling.beta import depends_on_temperature
from topw_deploy.sampling.likely_pairs import with_raw_scale
from topw_deploy.sampling.parameters import as_number, canonical_names
from topw_deploy.sampling.torch import TensorCrop, TensorGeometry, crop_rows

Source = Any
"""A transformers model, its embedding module, a table [V, d], a `TensorGeometry`, or None for the uniform metric."""

# Embedding module -> metric -> (state of the table, its geometry). Cached because computing the statistics reads the
# whole table twice.
_GEOMETRIES: WeakKeyDictionary[nn.Module, dict[str, tuple[tuple[int, int], TensorGeometry]]] = WeakKeyDictionary()


class Choices(TypedDict, total=False):
    """The fields of `sampling.TopWParameters` and `sampling.TopWOptions`, or the authors' names for them."""

    lam: float
    beta: float | str
    temperature: float
    selection_temperature: float
    init_top_p: float
    geom_scale: float
    top_m: int
    alt_iters: int
    metric: str
    potential: str
    knn_k: int


_NO_MEDIAN = (
    "the processor was given no median_distance; measure it with topw_deploy.processors.median_distance_of(model, "
    "tokenizer), or give geom_scale with geom_unit raw"
)


class TopWLogitsProcessor(CropProcessor):
    """Set the score of every token outside the crop to -inf. For `generate(logits_processor=...)`:

        topw = TopWLogitsProcessor(model, lam=1.0, temperature=0.8)
        model.generate(**inputs, **topw.generate_arguments(), max_new_tokens=64)

    Rows of a batch are independent and stay on their device.

    parameters: rounded to float32, as in an exported graph.
    options: the `TopWOptions` in use.
    geometry: the `TensorGeometry` in use.
    last: the `TensorCrop` of the last call, or None.
    """

    label = "Top-W"

    def __init__(
        self,
        model_or_embeddings: Source = None,
        *,
        preset: str | None = None,
        neighbour_bound: Tensor | None = None,
        geom_unit: str = "raw",
        median_distance: float | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        """Choose the parameters, and compute the embedding statistics.

        model_or_embeddings: the model, its embedding module, a table [V, d] or a `TensorGeometry`; optional for
            `uniform`.
        preset: "paper" (default), "released", "creative" or "lively"; `choices` override it.
        neighbour_bound: float32 [V], see `crop_rows`.
        geom_unit: the unit of `geom_scale`: "raw" (the metric's), or "median" (`median_distance`).
        median_distance: the median distance of likely pairs, > 0 (`median_distance_of`); 1 for `uniform`.
        beta: a number, or text that depends on `temperature` (`sampling.beta`).
        temperature: temperature of the draw; `generate` must get the same one.
        selection_temperature: temperature for choosing the crop; default `temperature`. If `temperature` is not given
            and `beta` is a number, `generate` may then draw at any temperature.

        Raises ParameterError for an unknown name or preset, a number out of range and a model without embeddings.
        """
        given = canonical_names(choices, (*PARAMETER_NAMES, *OPTION_NAMES))
        name = "paper" if preset is None else preset
        known = dict.fromkeys((*PRESETS, *REQUEST_PRESETS))
        if not isinstance(name, str) or name not in known:
            raise ParameterError(f"preset is {preset!r:.60}, but must be one of {', '.join(known)}.")
        _, options = PRESETS.get(name, (None, TopWOptions()))
        self.options = TopWOptions(
            **(asdict(options) | {key: value for key, value in given.items() if key in OPTION_NAMES})
        )
        self.geometry = geometry_of(model_or_embeddings, self.options.metric)
        overrides = {key: value for key, value in given.items() if key in PARAMETER_NAMES}
        overrides = _to_raw_geom_scale(overrides, geom_unit, median_distance, self.options.metric)
        if name in PRESETS:
            values = preset_values(name) | overrides
        else:
            table = self.geometry.table
            width = None if table is None else table.shape[1]
            values = preset_parameters(name, self.options.metric, width) | overrides
        self.parameters = as_float32(TopWParameters(**values))
        self.neighbour_bound = neighbour_bound
        super().__init__(
            float(values["temperature"]),
            greedy=self.parameters.greedy,
            any_temperature="temperature" not in given
            and self.parameters.selection_temperature > 0
            and not depends_on_temperature(values["beta"]),
        )

    def crop(self, scores: Tensor) -> TensorCrop:
        return crop_rows(scores, self.parameters, self.options, self.geometry, self.neighbour_bound)


def _to_raw_geom_scale(stated: dict[str, Any], unit: str, median: float | None, metric: str) -> dict[str, Any]:
    """Convert the geom_scale of `stated`, if there is one, from `unit` to the metric's unit."""
    if median is not None and not 0 < as_number("median_distance", median) < math.inf:
        raise ParameterError(f"median_distance is {median!r}, but must be a finite number > 0.", "median_distance")
    if "geom_scale" in stated:
        as_number("geom_scale", stated["geom_scale"])
    known_median = 1.0 if metric == "uniform" else median
    converted = dict(with_raw_scale({**stated, "geom_unit": unit}, known_median, _NO_MEDIAN))
    del converted["geom_unit"]
    return converted


def geometry_of(source: Source, metric: str) -> TensorGeometry:
    """The geometry of a model's input embeddings, cached for each module until its table changes.

    Raises ParameterError for a source without embeddings and for a geometry of another metric.
    """
    if isinstance(source, TensorGeometry):
        if source.metric != metric:
            raise ParameterError(
                f"the metric is {metric}, but a {source.metric} geometry was given; give one of that metric."
            )
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
    known = _GEOMETRIES.setdefault(module, {})
    if metric not in known or known[metric][0] != state:
        known[metric] = (state, TensorGeometry.from_embeddings(weight, metric))
    return known[metric][1]

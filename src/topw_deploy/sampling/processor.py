"""Top-W inside transformers' `generate`, without an export (docs/guide/transformers.md)."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from types import FrameType
from typing import Any, TypedDict, Unpack
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import GenerationError, ParameterError
from topw_deploy.sampling.geometry import (
    LIKELY_TEXT_TOKENS,
    SAMPLE_TEXT,
    first_and_last_tokens,
    median_distance,
    split_special_prefix,
)
from topw_deploy.sampling.parameters import (
    LIVELY,
    OPTION_NAMES,
    PARAMETER_NAMES,
    PRESETS,
    TopWOptions,
    TopWParameters,
    as_float32,
    canonical_names,
    check_choice,
    depends_on_temperature,
    preset_parameters,
    preset_values,
    read_number,
    with_raw_scale,
)
from topw_deploy.sampling.reference import metric_error

try:
    import torch
    from torch import Tensor, nn
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
    from transformers.generation.logits_process import TemperatureLogitsWarper

    from topw_deploy.sampling.torch import TensorCrop, TensorGeometry, crop_rows
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"topw_deploy.sampling.processor needs {error.name}; run: pip install torch transformers", name=error.name
    ) from error

Source = Any
"""A transformers model, its embedding module, a table [V, d], a `TensorGeometry`, or None for the uniform metric."""

# Embedding module -> metric -> (state of the table, its geometry). Cached because computing the statistics reads the
# whole table twice.
_GEOMETRIES: WeakKeyDictionary[nn.Module, dict[str, tuple[tuple[int, int], TensorGeometry]]] = WeakKeyDictionary()

_NO_MEDIAN = (
    "the processor was given no median_distance; measure it with topw_deploy.sampling.processor.median_distance_of("
    "model, tokenizer), or give geom_scale with geom_unit raw"
)

# Warpers that remove tokens: class name -> (generate's argument, attribute, value that removes nothing). They are
# recognised by name, because some transformers versions lack some of them.
_CUTTING_WARPERS = {
    "TopKLogitsWarper": ("top_k", "top_k", 0),
    "TopPLogitsWarper": ("top_p", "top_p", 1.0),
    "MinPLogitsWarper": ("min_p", "min_p", 0.0),
    "TopHLogitsWarper": ("top_h", "top_h", None),
    "TypicalLogitsWarper": ("typical_p", "mass", 1.0),
    "EpsilonLogitsWarper": ("epsilon_cutoff", "epsilon", 0.0),
    "EtaLogitsWarper": ("eta_cutoff", "epsilon", 0.0),
}


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


class TopWLogitsProcessor(LogitsProcessor):
    """Set the score of every token outside the crop to -inf. For `generate(logits_processor=...)`:

        topw = TopWLogitsProcessor(model, lam=1.0, temperature=0.8)
        model.generate(**inputs, **topw.generate_arguments(), max_new_tokens=64)

    Rows of a batch are independent and stay on their device.

    parameters: rounded to float32, as in an exported graph.
    options: the `TopWOptions` in use.
    geometry: the `TensorGeometry` in use.
    last: the `TensorCrop` of the last call, or None.
    """

    def __init__(
        self,
        model_or_embeddings: Source = None,
        *,
        preset: str | None = None,
        geom_unit: str = "raw",
        median_distance: float | None = None,
        **choices: Unpack[Choices],
    ) -> None:
        """Choose the parameters, and compute the embedding statistics.

        model_or_embeddings: the model, its embedding module, a table [V, d] or a `TensorGeometry`; optional for
            `uniform`.
        preset: "paper" (default), "released", "creative" or "lively"; `choices` override it.
        geom_unit: the unit of `geom_scale`: "raw" (the metric's), or "median" (`median_distance`).
        median_distance: the median distance of likely pairs, > 0 (`median_distance_of`); 1 for `uniform`.
        beta: a number, or text that depends on `temperature` (`beta_coefficients`).
        temperature: temperature of the draw; `generate` must get the same one.
        selection_temperature: temperature for choosing the crop; default `temperature`. If `temperature` is not given
            and `beta` is a number, `generate` may then draw at any temperature.

        Raises ParameterError for an unknown name or preset, a number out of range and a model without embeddings.
        """
        given = canonical_names(choices, (*PARAMETER_NAMES, *OPTION_NAMES))
        name = "paper" if preset is None else preset
        options = asdict(PRESETS[check_choice("preset", name, PRESETS)][1])
        self.options = TopWOptions(**(options | {key: value for key, value in given.items() if key in OPTION_NAMES}))
        self.geometry = geometry_of(model_or_embeddings, self.options.metric)
        own = {key: value for key, value in given.items() if key in PARAMETER_NAMES}
        if median_distance is not None:
            read_number("median_distance", median_distance, lambda x: 0 < x < math.inf, "a finite number > 0")
        median = 1.0 if self.options.metric == "uniform" else median_distance
        own = dict(with_raw_scale(own | {"geom_unit": geom_unit}, median, _NO_MEDIAN))
        del own["geom_unit"]
        if name == LIVELY:
            table = self.geometry.table
            values = preset_parameters(name, self.options.metric, None if table is None else table.shape[1]) | own
        else:
            values = preset_values(name) | own
        self.parameters = as_float32(TopWParameters(**values))
        self.last: TensorCrop | None = None
        any_temperature = "temperature" not in given and self.parameters.selection_temperature > 0
        any_temperature = any_temperature and not depends_on_temperature(values["beta"])
        # The temperature that generate must draw at; None for any.
        self._drawn_at = None if any_temperature or self.parameters.greedy else float(values["temperature"])

    def generate_arguments(self) -> dict[str, Any]:
        """Arguments for `generate` that apply this processor and switch off `generate`'s own warpers."""
        arguments: dict[str, Any] = {
            "logits_processor": LogitsProcessorList([self]),
            "do_sample": True,
            "num_beams": 1,
            "top_k": 0,
            "top_p": 1.0,
            "typical_p": 1.0,
            "epsilon_cutoff": 0.0,
            "eta_cutoff": 0.0,
            "min_p": None,
        }
        if hasattr(GenerationConfig(), "top_h"):  # absent in some transformers versions
            arguments["top_h"] = None
        if self.parameters.greedy:  # generate refuses the temperature 0
            return arguments | {"temperature": 1.0}
        return arguments if self._drawn_at is None else arguments | {"temperature": self._drawn_at}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores [B, V] of tokens outside the crop to -inf. Returns the same dtype and device.

        Raises GenerationError for a row with NaN, +inf or nothing finite, and ParameterError if `generate` would change
        the crop or if the scores are wider than the embedding table.
        """
        _check_caller(self, self._drawn_at, sys._getframe(1))
        self.last = crop_rows(scores, self.parameters, self.options, self.geometry)
        if self.last.any_invalid:
            row = int(self.last.invalid.int().argmax())
            raise GenerationError(
                f"row {row} of the batch has NaN, +inf or no finite score at position {input_ids.shape[1]}; check the "
                "model's output and the processors before Top-W."
            )
        return self.last.masked(scores)


def _check_caller(processor: LogitsProcessor, temperature: float | None, frame: FrameType | None) -> None:
    """Check the warpers in the `LogitsProcessorList` that calls `processor`, and the caller of that list.

    `generate` appends its own warpers (by default top-k 50) to that list. The call does not pass the list, so it is
    read from the calling frame. If anything else calls the processor, nothing is checked.

    temperature: the temperature that `generate` must draw at; None for any.
    frame: the frame that calls `processor.__call__`.

    Raises ParameterError for beam search, for a later warper that removes tokens, and for another temperature.
    """
    while frame is not None and frame.f_code.co_name == "__call__":  # a subclass may call its parent's
        warpers = frame.f_locals.get("self")
        if isinstance(warpers, LogitsProcessorList):
            break
        frame = frame.f_back
    else:
        return
    if frame.f_back is not None and frame.f_back.f_code.co_name == "_beam_search":
        raise ParameterError(
            "generate runs a beam search, which needs more tokens a step than Top-W may keep; pass num_beams=1."
        )
    place = next((i for i, other in enumerate(warpers) if other is processor), len(warpers))
    drawn_at = 1.0
    for warper in warpers[place + 1 :]:
        name, attribute, neutral = _CUTTING_WARPERS.get(type(warper).__name__, (None, "", None))
        value = getattr(warper, attribute, None)
        if name is not None and (neutral is None or value != neutral):
            default = " (its default)" if (name, value) == ("top_k", 50) else ""
            raise ParameterError(
                f"generate applies {name}={value} after Top-W{default}, which would cut the crop again; pass "
                f"{name}={neutral}, or **processor.generate_arguments()."
            )
        if isinstance(warper, TemperatureLogitsWarper):
            drawn_at *= warper.temperature
    if temperature is not None and drawn_at != temperature:
        raise ParameterError(
            f"generate draws at temperature {drawn_at}, but the processor has {temperature}; give both the same "
            f"(with do_sample=True), or give the processor only selection_temperature."
        )


def geometry_of(source: Source, metric: str) -> TensorGeometry:
    """The geometry of a model's input embeddings, cached for each module until its table changes.

    Raises ParameterError for a source without embeddings and for a geometry of another metric.
    """
    if isinstance(source, TensorGeometry):
        if source.metric != metric:
            raise metric_error(metric, source)
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


@torch.no_grad()
def median_distance_of(model: Any, tokenizer: Any, metric: str = "mahalanobis") -> float:
    """The median distance of likely pairs (docs/contract/graph.md, section 2), for `geom_unit="median"`.

    Runs the model on at most two texts of up to 64 tokens, as the verification of an export does.

    model: a transformers causal language model.
    tokenizer: the model's tokenizer; it must report special tokens, as those of transformers do.
    metric: one of METRICS. Under `uniform` the median is 1, and the model does not run.

    Raises ParameterError for a model without embeddings, and if no step has two likely tokens at a distance > 0.
    """
    if metric == "uniform":
        return 1.0
    geometry = geometry_of(model, metric)
    weight = model.get_input_embeddings().weight
    encoded = tokenizer(SAMPLE_TEXT, return_special_tokens_mask=True)
    start, body = split_special_prefix(encoded["input_ids"], encoded["special_tokens_mask"], len(weight))
    context = getattr(model.config, "max_position_embeddings", None)
    longest = LIKELY_TEXT_TOKENS if context is None else min(LIKELY_TEXT_TOKENS, context)

    def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        tokens = torch.from_numpy(ids)[None].to(weight.device)
        found: NDArray[np.float32] = model(input_ids=tokens).logits[0].float().cpu().numpy()
        return found

    rows = (row for ids in first_and_last_tokens(start, body, longest) for row in logits(ids))
    found = median_distance(geometry, rows)
    if found is None:
        raise ParameterError(
            "the model has no median distance: no step has two likely tokens at a distance > 0; check the model and "
            "its tokenizer.",
            "median_distance",
        )
    return found

"""The base class of the processors: arguments for `generate`, and the checks of every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from topw_deploy.errors import GenerationError
from topw_deploy.processors.warpers import check_warpers, frame_of_caller
from topw_deploy.sampling.torch import TensorCrop


class CropProcessor(LogitsProcessor):
    """Set the score of every token outside a crop to -inf.

    last: the `TensorCrop` of the last call, or None.
    """

    label: str
    """The rule's name in messages."""

    def __init__(self, temperature: float, *, greedy: bool, any_temperature: bool) -> None:
        """Set what `generate` may draw at.

        temperature: the temperature of the draw, not rounded.
        greedy: whether a crop keeps only the largest logit, so that the temperature has no effect.
        any_temperature: whether `generate` may draw at any temperature.
        """
        self.last: TensorCrop | None = None
        self._temperature = temperature
        self._greedy = greedy
        self._any_temperature = any_temperature

    def crop(self, scores: Tensor) -> TensorCrop:
        """Choose the kept sets of scores [B, V]."""
        raise NotImplementedError

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
        if self._greedy:  # generate refuses the temperature 0
            return arguments | {"temperature": 1.0}
        return arguments if self._any_temperature else arguments | {"temperature": self._temperature}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores [B, V] of tokens outside the crop to -inf. Returns the same dtype and device.

        Raises GenerationError for a row with NaN, +inf or nothing finite, and ParameterError if `generate` would change
        the crop or if the scores are wider than the embedding table.
        """
        temperature = None if self._any_temperature or self._greedy else self._temperature
        check_warpers(self, temperature, frame_of_caller(), self.label)
        self.last = self.crop(scores)
        if self.last.any_invalid:
            row = int(self.last.invalid.int().argmax())
            raise GenerationError(
                f"row {row} of the batch has NaN, +inf or no finite score at position {input_ids.shape[1]}; check the "
                f"model's output and the processors before {self.label}."
            )
        return self.last.masked(scores)

"""`RuleLogitsProcessor`: the other sampling rules as a transformers logits processor."""

from __future__ import annotations

from typing import TypedDict, Unpack

from torch import Tensor

from topw_deploy.errors import ParameterError
from topw_deploy.processors.base import CropProcessor
from topw_deploy.sampling import TopWParameters, as_float32
from topw_deploy.sampling.parameters import unknown_name
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES, TOP_W, RuleParameters
from topw_deploy.sampling.torch import TensorCrop, rule_rows


class RuleChoices(TypedDict, total=False):
    """The fields of `sampling.rules.RuleParameters`."""

    rule: str
    top_k: int
    top_p: float
    min_p: float
    top_h: float
    top_h_pool: int
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    top_n_sigma: float
    min_k_tau: float


class RuleLogitsProcessor(CropProcessor):
    """Set the score of every token outside the rule's crop to -inf. For `generate(logits_processor=...)`:

        sigma = RuleLogitsProcessor(top_n_sigma=1.0)
        model.generate(**inputs, **sigma.generate_arguments(), temperature=1.5, max_new_tokens=64)

    rule: the `RuleParameters` in use.
    parameters: the temperatures, rounded to float32.
    last: the `TensorCrop` of the last call, or None.
    """

    def __init__(
        self, *, temperature: float = 1.0, selection_temperature: float = 0.0, **choices: Unpack[RuleChoices]
    ) -> None:
        """Choose the rule and the temperatures.

        temperature: temperature of the draw. `generate` must get the same one, unless the crop does not depend on it
            (top_k, top_n_sigma, min_k, none, or with a selection_temperature).
        selection_temperature: temperature for choosing the crop; 0 means `temperature`.

        Raises the errors of `RuleParameters`, and ParameterError for the rule top_w.
        """
        for name in choices:
            if name not in RULE_PARAMETER_NAMES:
                raise unknown_name(name, (*RULE_PARAMETER_NAMES, "temperature", "selection_temperature"))
        self.rule = RuleParameters(**choices)
        if self.rule.chosen is TOP_W:
            raise ParameterError("the rule is top_w, which needs embeddings; use TopWLogitsProcessor.", "rule")
        given = TopWParameters(temperature=temperature, selection_temperature=selection_temperature)
        self.parameters = as_float32(given)
        self.label = self.rule.chosen.name
        any_temperature = self.parameters.selection_temperature > 0 or not self.rule.chosen.uses_temperature
        super().__init__(float(temperature), greedy=self.parameters.greedy, any_temperature=any_temperature)

    def crop(self, scores: Tensor) -> TensorCrop:
        return rule_rows(scores, self.rule, self.parameters.temperature, self.parameters.selection_temperature)

"""The request of `topw bench rules`, the samplers that it selects, and its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import DecoderManifest
from topw_deploy.runtime.folder import ModelFolder
from topw_deploy.runtime.rule_settings import RuleSetting, read_rules
from topw_deploy.runtime.tokenizer import Tokenizer
from topw_deploy.sampling.parameters import check_range
from topw_deploy.sampling.rules import TOP_W
from topw_lab.bench import sides
from topw_lab.bench.process import require_few_threads
from topw_lab.bench.prompts import decoder_manifest, random_prompt, require_context
from topw_lab.bench.sides import MIN_P, TOP_K, TOP_P, Side

DEFAULT_RULES = f"top_k={TOP_K},top_p={TOP_P},min_p={MIN_P},top_h=0.4,top_w"
DEFAULT_TEMPERATURES = (0.5, 1.0, 1.5, 2.0)  # from the range in the paper's second version, which also has 0.7
PROMPT_TOKENS = 128
"""Default length of the random prompt."""

_FEWEST_NEW_TOKENS = 2  # the time of the first token is not counted


@dataclass(frozen=True, kw_only=True)
class RulesRequest:
    """Options of `topw bench rules`.

    folders: exported models; each is measured with every sampler and thread count.
    rules: Top-W once, and at least one other rule.
    temperatures: without duplicates.
    samplers: "native" (the operator) and "graph" (the function in the file); empty for all that are available.
    prompt: the text to continue; None for a random prompt.
    prompt_tokens: length of the random prompt. None: PROMPT_TOKENS.
    new_tokens: number of tokens of a generation, which does not end at EOS.
    threads: thread counts.
    rounds: number of generations per rule and temperature.
    seed: of the prompt, of the order and of the draws.

    Raises ParameterError for a value out of range.
    """

    folders: Sequence[Path]
    rules: Sequence[RuleSetting] = tuple(read_rules(DEFAULT_RULES))
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES
    samplers: Sequence[str] = ()
    prompt: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int = 64
    threads: Sequence[int] = (1,)
    rounds: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("new_tokens", _FEWEST_NEW_TOKENS), ("rounds", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ParameterError(f"{name} is {value}, but must be an integer >= {least}.", name)
        if self.prompt is not None and self.prompt_tokens is not None:
            raise ParameterError("prompt and prompt_tokens are both given; give one of them.", "prompt_tokens")
        for name in ("folders", "rules", "temperatures"):
            values = [getattr(value, "label", value) for value in getattr(self, name)]
            if not values or len(set(values)) < len(values):
                listed = ", ".join(map(str, values)) or "empty"
                raise ParameterError(f"{name} is {listed}, but must have at least one value, each once.", name)
        if len(self._top_w_labels) != 1 or len(self.rules) < 2:
            raise ParameterError(
                f"rules is {', '.join(rule.label for rule in self.rules)}, but must have top_w once, and at least one "
                "other to compare it with.",
                "rules",
            )
        for temperature in self.temperatures:
            with np.errstate(over="ignore"):
                check_range("temperature", temperature, float(np.float32(temperature)))
        require_few_threads(self.threads)

    @property
    def top_w_label(self) -> str:
        """The label of Top-W."""
        return self._top_w_labels[0]

    @property
    def _top_w_labels(self) -> list[str]:
        return [rule.label for rule in self.rules if rule.parameters["rule"] == TOP_W.name]


def choose(request: RulesRequest) -> tuple[list[Side], list[Side]]:
    """Select the samplers. Returns (samplers to run, samplers that are not available).

    Raises ParameterError for an unknown name in `samplers`, BenchmarkError if a named one is not available.
    """
    every = [Side("native", "native", "ours", why_not=sides.why_no_native_library()), Side("graph", "graph", "ours")]
    return sides.choose(every, request.samplers, ())


def prompt_ids(request: RulesRequest, folder: Path) -> list[int]:
    """The token ids of the prompt for the model in `folder`.

    Raises ManifestError for a folder without a decoder, ParameterError if the tokens exceed its context, PromptError
    for a text without tokens.
    """
    if request.prompt is None:
        return random_prompt(folder, request.prompt_tokens or PROMPT_TOKENS, request.new_tokens, request.seed)
    manifest = decoder_manifest(folder)
    ids = Tokenizer(ModelFolder(folder, DecoderManifest)).encode(request.prompt)
    if not ids:
        raise PromptError("the prompt has no tokens; give some text.", "prompt")
    require_context(manifest, len(ids), request.new_tokens, "prompt")
    return ids

"""An exported model in `Engine`, which answers problems by a rule."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sums.problems import Problem
from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError
from topw_deploy.runtime import TopWModel

NEW_TOKENS = 184  # the longest true answer has about 160 tokens, the context 256
GREEDY = "greedy"
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class RuleChoice:
    """A rule with its parameters, from the command line.

    label: the text that was given.
    parameters: the parameters of `generate`. Without `rule`, a rule's parameter implies the rule; none means Top-W.
    """

    label: str
    parameters: Mapping[str, Any]

    @staticmethod
    def parse(text: str) -> RuleChoice:
        """Read `min_p=0.1`, `top_w`, `top_w,lam=2.2,beta=2.8`, `top_h=0.4,top_h_pool=100`, `none` or `greedy`.

        Raises ParameterError for another form.
        """
        parameters: dict[str, Any] = {}
        for place, part in enumerate(text.split(",")):
            name, sign, value = part.partition("=")
            if not name.isidentifier() or (sign and not value) or (place and not sign):
                raise ParameterError(
                    f"the rule {text!r:.60} is not a rule's name or parameter=value, with any further parameter=value "
                    "after commas; see --help."
                )
            if sign:
                parameters[name] = _parse_number(value)
            elif name != "top_w":  # the default
                parameters["rule"] = name
        return RuleChoice(text, parameters)

    @property
    def greedy(self) -> bool:
        return self.parameters.get("rule") == GREEDY


def _parse_number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Reply:
    """One generated text.

    tokens: number of generated tokens.
    kept: mean size of its crops; None if unknown.
    """

    text: str
    tokens: int
    kept: float | None


class EngineSide:
    """An exported model in the batching engine.

    folder: written by `topw-export`.
    batch: number of rows that run at once.
    """

    def __init__(self, folder: Path, batch: int, threads: int | None) -> None:
        self._model = TopWModel.from_pretrained(folder, intra_op_num_threads=threads)
        self._engine = Engine(self._model, max_batch=batch, when_full="wait", max_length=256)

    def replies(self, asked: Sequence[Problem], rule: RuleChoice, temperature: float, seed: int) -> list[Reply]:
        parameters = {"temperature": 0.0} if rule.greedy else {**rule.parameters, "temperature": temperature}
        requests = [
            self._engine.submit(p.prompt, max_new_tokens=NEW_TOKENS, seed=seed * _SEED_STRIDE + place, **parameters)
            for place, p in enumerate(asked)
        ]
        results = [request.result() for request in requests]
        return [Reply(r.text, len(r.token_ids), statistics.fmean(r.kept)) for r in results]

    def close(self) -> None:
        self._engine.shutdown()
        self._model.close()

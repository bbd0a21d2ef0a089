"""An exported model in `Engine`, which answers problems by a rule."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sums.problems import Problem
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.rule_settings import RuleSetting, read_rules

NEW_TOKENS = 184  # the longest true answer has about 160 tokens, the context 256
GREEDY = "greedy"
_SEED_STRIDE = 1_000_003


def read_rule(text: str) -> RuleSetting:
    """Read `greedy`, or a setting as in `topw bench rules`: `min_p=0.1`, `top_w:lam=2.2:beta=2.8`."""
    return RuleSetting(GREEDY, {}) if text == GREEDY else read_rules(text)[0]


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

    def replies(self, asked: Sequence[Problem], rule: RuleSetting, temperature: float, seed: int) -> list[Reply]:
        """temperature: 0 for greedy decoding."""
        parameters = {**rule.parameters, "temperature": temperature}
        requests = [
            self._engine.submit(p.prompt, max_new_tokens=NEW_TOKENS, seed=seed * _SEED_STRIDE + place, **parameters)
            for place, p in enumerate(asked)
        ]
        results = [request.result() for request in requests]
        return [Reply(r.text, len(r.token_ids), statistics.fmean(r.kept)) for r in results]

    def close(self) -> None:
        self._engine.shutdown()
        self._model.close()

"""Computes log-likelihoods of continuations by requests for log-probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.outputs import logits_output
from topw_lab.harness.running import PromptRequest, Runner

Pair: TypeAlias = "tuple[Sequence[int], Sequence[int]]"
"""Token ids of a context and of a continuation."""

# Parameters that undo what a model's generation config may ban, because the scored token must be drawn.
_UNEDITED: dict[str, Any] = {
    "temperature": 0.0,
    "min_new_tokens": 0,
    "min_length": 0,
    "suppress_tokens": [],
    "bad_words_ids": [],
    "no_repeat_ngram_size": 0,
    "seed": 0,
}


class Scorer:
    """Scores each continuation in the faster of two ways.

    - One request per token of the continuation. It reads the tokens before this token in chunks, and draws this token
      as the only allowed one. All requests but the first reuse the tokens that the request before has read.
    - One request for `prompt_logprobs`. It reads context and continuation token by token, in steps of all rows.

    tokens: maximum number of tokens of context and continuation together.
    rows: number of rows of the engine.
    """

    def __init__(self, model: TopWModel, runner: Runner, tokens: int, rows: int) -> None:
        self._model, self._runner, self._tokens, self._rows = model, runner, tokens, rows

    def scores(self, pairs: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        """Yield (log-probability, whether each token is the greedy one) of each continuation, in order.

        pairs: contexts and continuations, which must not be empty. A context that is too long loses its beginning.

        Raises ParameterError for a folder without logits, PromptError for a continuation longer than the context.
        """
        if logits_output(self._model.manifest) is None:
            raise ParameterError(
                f"log-likelihoods need the output logits, which the graph of {self._model.path} lacks; export it again "
                "with --with-logits."
            )
        results = self._runner.results(itertools.chain.from_iterable(map(self._requests, pairs)))
        for _, continuation in pairs:
            yield self._score(results, len(continuation))

    def _requests(self, pair: Pair) -> Iterable[PromptRequest]:
        context, continuation = pair
        if len(continuation) >= self._tokens:
            raise PromptError(
                f"a continuation has {len(continuation)} tokens, but at most {self._tokens - 1} can be scored; shorten "
                "it."
            )
        whole = [*context, *continuation][-self._tokens :]
        start = len(whole) - len(continuation)
        if not self._scores_by_drawing(len(continuation), len(whole)):
            return [(whole, {**_UNEDITED, "max_new_tokens": 0, "prompt_logprobs": 0})]
        one = {**_UNEDITED, "max_new_tokens": 1, "logprobs": 0}
        return [(whole[:end], {**one, "allowed_token_ids": whole[end : end + 1]}) for end in range(start, len(whole))]

    def _scores_by_drawing(self, continuation: int, whole: int) -> bool:
        """Whether drawing the tokens is the faster way.

        continuation, whole: number of tokens of the continuation, and of context and continuation together.

        Drawing takes a run of one row per token of the continuation. The other way takes a step of all rows per token
        of context and continuation.
        """
        return continuation == 1 or (self._runner.reuses and continuation * self._rows <= whole)

    def _score(self, results: Iterator[GenerationResult], continuation: int) -> tuple[float, bool]:
        result = next(results)
        if result.prompt_logprobs is not None:
            return result.prompt_likelihood(result.prompt_tokens - continuation)
        drawn = [result, *itertools.islice(results, continuation - 1)]
        entries = [one.token_logprobs[0] for one in drawn if one.token_logprobs]
        return math.fsum(entry.logprob for entry in entries), all(entry.greedy for entry in entries)

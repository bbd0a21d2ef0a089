"""Log-probabilities of tokens under the model: the log softmax of the graph's output `logits`.

Edits, masks and temperatures do not change that output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import LogitsError
from topw_deploy.runtime.results import TokenLogprob, TopLogprob

_BLOCKS_PER_TOKEN = 8  # of `best`: more blocks leave fewer candidates

Logits: TypeAlias = NDArray[np.float32]
"""The logits [V] of one step."""

TextOf: TypeAlias = Callable[[int], str]
"""A function from a token id to the text of that token alone."""


class TokenScore(NamedTuple):
    """The numbers of a TokenLogprob.

    ids: int64 [k], of top_logprobs.
    logprobs: float64 [k], of top_logprobs.
    """

    token: int
    logprob: float
    greedy: bool
    ids: np.ndarray
    logprobs: np.ndarray


def score_token(logits: np.ndarray, token: int, count: int) -> TokenScore | None:
    """The log-probabilities of `token` and of the `count` best tokens.

    logits: float [V].

    Returns None if a logit is NaN or +inf, or none is finite.
    """
    logits = logits.astype(np.float32, copy=False)
    first = int(logits.argmax())  # the first NaN, if there is one
    largest = float(logits[first])
    if not math.isfinite(largest):
        return None
    weights = np.subtract(logits, logits[first])
    np.exp(weights, out=weights)
    total = largest + math.log(float(weights.sum(dtype=np.float64)))
    ids = best_ids(logits, count)
    return TokenScore(token, float(logits[token]) - total, token == first, ids, logits[ids].astype(np.float64) - total)


def best_ids(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest logits, best first, the lowest id first among equals.

    logits: float32 [V], without NaN.
    """
    if not count:
        return np.zeros(0, np.int64)
    candidates = np.arange(len(logits))
    blocks = _BLOCKS_PER_TOKEN * count
    if blocks < len(logits):
        width = len(logits) // blocks
        maxima = logits[: blocks * width].reshape(blocks, width).max(axis=1)
        # `count` blocks have a logit of at least this.
        candidates = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]


class Scores:
    """Collects the log-probabilities of one sequence under the model.

    logprobs, prompt_logprobs: the parameters.
    """

    def __init__(self, logprobs: int | None, prompt_logprobs: int | None, text_of: TextOf) -> None:
        self._logprobs, self._prompt_logprobs, self._text_of = logprobs, prompt_logprobs, text_of
        self._prompt: list[TokenScore] = []
        self._drawn: list[TokenScore] = []
        self._returned = 0  # number of drawn tokens whose entries `take_new_entries` has returned

    def add_prompt(self, logits: np.ndarray, token: int) -> None:
        """Add the prompt's next token. logits: [V], after the token before. Raises LogitsError for NaN or +inf."""
        where = f"token {len(self._prompt) + 1} of the prompt"
        self._prompt.append(self._score_token(logits, token, self._prompt_logprobs, where))

    def add(self, logits: np.ndarray, token: int) -> None:
        """Add the next drawn token. logits: [V], from which it was drawn. Raises LogitsError for NaN or +inf."""
        self._drawn.append(self._score_token(logits, token, self._logprobs, f"step {len(self._drawn)}"))

    def prompt_entries(self) -> list[TokenLogprob | None] | None:
        """One entry per prompt token that was read, None for the first one.

        Returns None without the parameter `prompt_logprobs`.
        """
        if self._prompt_logprobs is None:
            return None
        return [None, *self._to_entries(self._prompt)]

    def drawn_entries(self, start: int = 0, end: int | None = None) -> list[TokenLogprob] | None:
        """One entry per drawn token from `start` to `end`, exclusive. None without the parameter `logprobs`."""
        return None if self._logprobs is None else self._to_entries(self._drawn[start:end])

    def take_new_entries(self, end: int) -> list[TokenLogprob] | None:
        """Return the entries of drawn tokens before `end` that earlier calls have not returned."""
        start, self._returned = self._returned, end
        return self.drawn_entries(start, end)

    def _score_token(self, logits: np.ndarray, token: int, count: int | None, where: str) -> TokenScore:
        found = score_token(logits, token, count or 0)
        if found is None:
            raise LogitsError(
                f"the logits at {where} contain NaN or +infinity, or none is finite, so there are no "
                "log-probabilities; check the model with `topw verify`, or leave logprobs out."
            )
        return found

    def _to_entries(self, scores: Sequence[TokenScore]) -> list[TokenLogprob]:
        texts: dict[int, str] = {}

        def text(token: int) -> str:
            if token not in texts:
                texts[token] = self._text_of(token)
            return texts[token]

        return [
            TokenLogprob(
                one.token,
                text(one.token),
                one.logprob,
                one.greedy,
                tuple(
                    TopLogprob(token, text(token), value)
                    for token, value in zip(one.ids.tolist(), one.logprobs.tolist(), strict=True)
                ),
            )
            for one in scores
        ]

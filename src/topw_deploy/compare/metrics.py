"""Numbers of generated texts, over the model's tokens: each text is a sequence of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any

REPEATED = 4
"""The n of `repetition`."""


def ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All n-grams in order; none if the text is shorter."""
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def distinct(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """The share of different n-grams among all n-grams of `texts`; None if there are none.

    Source: distinct-n of Li et al. 2016 (arXiv 1510.03055), but divided by the number of n-grams, not of tokens. It
    falls with the length of the texts.
    """
    found = [gram for text in texts for gram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else None


def repetition(tokens: Sequence[int], n: int = REPEATED) -> float | None:
    """The share of a text's n-grams that repeat an earlier one: 1 - distinct n-grams / n-grams; None if it has none.

    Source: seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319).
    """
    different = distinct([tokens], n)
    return None if different is None else 1 - different


def self_bleu(texts: Sequence[Sequence[int]]) -> float | None:
    """The mean BLEU-4 of each text against all others, in [0, 1]; None for fewer than two texts with tokens.

    Source: Self-BLEU of Zhu et al. 2018 (arXiv 1802.01886). BLEU is sacrebleu's sentence BLEU over token ids, with its
    default smoothing, and with the orders that a text of fewer than four tokens has. A text without tokens is left out.
    """
    lines = [" ".join(map(str, text)) for text in texts if len(text)]
    if len(lines) < 2:
        return None
    bleu = _bleu()
    scores = (bleu.sentence_score(line, lines[:i] + lines[i + 1 :]).score for i, line in enumerate(lines))
    return fmean(scores) / 100


@cache
def _bleu() -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize="none", effective_order=True)

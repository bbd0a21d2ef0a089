"""The numbers of each rule at each temperature, with bootstrap intervals over prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from topw_deploy.compare.collect import Cell, Comparison, Sample

REPEATED = 4
"""The n of `repetition`."""
LEVEL = 0.95
RESAMPLES = 1000

Terms: TypeAlias = "tuple[float, float]"
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a rule at a temperature.

    name: in JSON. title: in tables. definition: one sentence.
    terms: of one prompt's texts: a sum and the number of its terms. The metric is the quotient of their sums over all
        prompts. None for a metric without an interval.
    raised: whether the metric is e to the power of that.
    logarithmic: scale of its plot. share: whether it is in [0, 1].
    """

    name: str
    title: str
    definition: str
    terms: Callable[[Sequence[Sample]], Terms] | None = None
    raised: bool = False
    logarithmic: bool = False
    share: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A metric's value and its interval; None where it is undefined or infinite."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A cell's numbers.

    values: by the metric's name, all of METRICS.
    tokens: drawn tokens of all texts.
    """

    cell: Cell
    values: Mapping[str, Value]
    texts: int
    tokens: int


def _mean(values: Sequence[float | None]) -> Terms:
    known = [value for value in values if value is not None]
    return math.fsum(known), len(known)


def _surprisal(samples: Sequence[Sample]) -> Terms:
    known = [one for one in samples if one.surprisal is not None]
    return math.fsum(one.surprisal or 0.0 for one in known), sum(one.drawn for one in known)


def _distinct(samples: Sequence[Sample], n: int) -> Terms:
    return _mean([distinct([one.tokens for one in samples], n)])


def _per_token(samples: Sequence[Sample], name: str) -> Terms:
    values = [getattr(one, name) for one in samples]
    return math.fsum(sum(each) for each in values if each is not None), sum(len(each or ()) for each in values)


METRICS: tuple[Metric, ...] = (
    Metric(
        "perplexity",
        "perplexity",
        "e to the mean of -ln p over all drawn tokens, where p is the model's own probability: at temperature 1, over "
        "the whole vocabulary, without edits of logits.",
        _surprisal,
        raised=True,
        logarithmic=True,
    ),
    *(
        Metric(
            f"distinct_{n}",
            f"distinct-{n}",
            f"Different {n}-grams of tokens divided by all {n}-grams, over a prompt's texts together; the mean over "
            "prompts. It falls with the length of the texts.",
            partial(_distinct, n=n),
            share=True,
        )
        for n in (1, 2, 3)
    ),
    Metric(
        "self_bleu",
        "self-BLEU",
        "BLEU-4, over tokens, of a text against the other texts of its prompt, with sacrebleu's smoothing; the mean "
        "over a prompt's texts and over prompts. High means that texts are alike.",
        lambda samples: _mean([self_bleu([one.tokens for one in samples])]),
        share=True,
    ),
    Metric(
        "repetition",
        "repetition",
        f"The share of a text's {REPEATED}-grams of tokens that occurred earlier in it; the mean over texts.",
        lambda samples: _mean([repetition(one.tokens) for one in samples]),
        share=True,
    ),
    Metric(
        "kept_mean", "kept", "Tokens that the rule kept, mean over steps.", partial(_per_token, name="kept"),
        logarithmic=True,
    ),
    Metric("kept_median", "kept, median", "Tokens that the rule kept, median over steps.", logarithmic=True),
    Metric(
        "mass", "mass", "The kept tokens' share of the probability, mean over steps.", partial(_per_token, name="mass"),
        share=True,
    ),
    Metric(
        "certified", "certified",
        "The share of certified steps: under Top-W, the kept tokens were proven without token distances; under other "
        "rules, all of them are among the 64 best.",
        partial(_per_token, name="certified"), share=True,
    ),
    Metric(
        "tokens_per_second", "tokens/s",
        "Drawn tokens per second of wall-clock time, with reading the prompts and computing log-probabilities.",
    ),
)  # fmt: skip


def summarise(comparison: Comparison) -> list[Summary]:
    """One summary per cell, in order. All cells use the same resamples of prompts."""
    count = len(comparison.prompts)
    rng = np.random.default_rng(0)
    weights = rng.multinomial(count, [1 / count] * count, size=RESAMPLES).astype(np.float64)  # [R, P]
    return [_summary(cell, weights) for cell in comparison.cells]


def _summary(cell: Cell, weights: Floats) -> Summary:
    texts = [one for samples in cell.samples for one in samples]
    tokens = sum(one.drawn for one in texts)
    kept = [size for one in texts for size in one.kept]
    values = {
        "kept_median": Value(float(np.median(kept)) if kept else None),
        "tokens_per_second": Value(tokens / cell.seconds if cell.seconds else None),
    }
    for metric in METRICS:
        if metric.terms is not None:
            terms = np.array([metric.terms(samples) for samples in cell.samples], np.float64)  # [P, 2]
            values[metric.name] = interval(terms, weights, raised=metric.raised)
    return Summary(cell, values, len(texts), tokens)


def interval(terms: Floats, weights: Floats, *, raised: bool = False) -> Value:
    """The quotient of the sums of `terms` [P, 2] and its percentile bootstrap interval.

    weights: [R, P], how often each resample has a prompt. Resamples without terms are left out. No interval for fewer
    than two prompts with terms.

    Source: the percentile interval of Efron 1979 ("Bootstrap methods: another look at the jackknife").
    """
    value = _quotient(terms.sum(axis=0)[None], raised)[0]
    if not np.isfinite(value):
        return Value(None)
    found = _quotient(weights @ terms, raised) if np.count_nonzero(terms[:, 1]) >= 2 else np.zeros(0)
    found = found[np.isfinite(found)]
    if not len(found):
        return Value(float(value))
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Value(float(value), float(low), float(high))


def _quotient(sums: Floats, raised: bool) -> Floats:
    """[N] of sums [N, 2]; NaN where there are no terms."""
    with np.errstate(all="ignore"):
        found: Floats = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], np.nan)
        return np.exp(found) if raised else found


def as_dict(comparison: Comparison, summaries: Sequence[Summary]) -> dict[str, Any]:
    """The report with all texts, as JSON types."""
    request = comparison.request
    return {
        "folder": str(request.folder),
        "model": comparison.model,
        "provider": comparison.provider,
        "sampler": comparison.sampler,
        "seed": request.seed,
        "samples": request.samples,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": request.ignore_eos,
        "missing_outputs": list(comparison.missing),
        "rules": [{"label": rule.label, "parameters": dict(rule.parameters)} for rule in request.rules],
        "temperatures": list(request.temperatures),
        "metrics": {metric.name: metric.definition for metric in METRICS},
        "intervals": {"level": LEVEL, "over": "prompts", "resamples": RESAMPLES},
        "prompts": list(comparison.prompts),
        "cells": [_cell(summary) for summary in summaries],
    }


def _cell(summary: Summary) -> dict[str, Any]:
    cell = summary.cell
    return {
        "rule": cell.rule.label,
        "temperature": cell.temperature,
        "texts": summary.texts,
        "tokens": summary.tokens,
        "seconds": cell.seconds,
        "values": {
            metric.name: {"value": found.value, "low": found.low, "high": found.high}
            for metric in METRICS
            for found in [summary.values[metric.name]]
        },
        "samples": [
            {
                "prompt": prompt,
                "sample": number,
                "text": one.text,
                "token_ids": list(one.tokens),
                "drawn": one.drawn,
                "surprisal": one.surprisal,
                "finish_reason": one.finish_reason,
            }
            for prompt, samples in enumerate(cell.samples)
            for number, one in enumerate(samples)
        ],
    }


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

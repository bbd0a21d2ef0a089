"""The report of `topw compare`: metrics of each rule at each temperature, with bootstrap intervals over prompts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.manifest import MANIFEST_NAME, sha256_of
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.loop import logits_output
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.sampling.seeds import prompt_seed
from topw_deploy.text import count_text
from topw_lab.running import PromptRequest, Runner, prepare_prompt
from topw_lab.tables import significant, table

REPEATED_NGRAM = 4
"""Default n of `repeated_share`."""
CONFIDENCE = 0.95
"""Confidence level of the intervals."""
RESAMPLES = 1000
"""Bootstrap samples per interval."""

Terms: TypeAlias = "tuple[float, float]"
"""(Sum, number of terms) of a metric over the texts of one prompt."""
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TextMetric:
    """A metric of the texts of one rule at one temperature.

    name: name in JSON.
    title: name in tables.
    definition: one sentence for readers of the report.
    terms: function of the texts of one prompt. The metric is the sum of the first elements over all prompts, divided by
        the sum of the second ones.
    is_exponential: whether the metric is e to the power of that quotient.
    logarithmic: whether the axis of the metric's plot is logarithmic.
    """

    name: str
    title: str
    definition: str
    terms: Callable[[Sequence[Sample]], Terms]
    is_exponential: bool = False
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class MetricValue:
    """The value of a metric and the ends of its interval; None where they are undefined or infinite."""

    value: float | None
    low: float | None = None
    high: float | None = None


def _mean_terms(values: Sequence[float | None]) -> Terms:
    known = [value for value in values if value is not None]
    return math.fsum(known), len(known)


def _distinct_terms(samples: Sequence[Sample], n: int) -> Terms:
    return _mean_terms([distinct_share([one.token_ids for one in samples], n)])


def _per_token_terms(samples: Sequence[Sample], name: str) -> Terms:
    known = [one for one in samples if getattr(one, name) is not None]
    return math.fsum(getattr(one, name) for one in known), sum(one.drawn for one in known)


TEXT_METRICS: tuple[TextMetric, ...] = (
    TextMetric(
        "accuracy", "accuracy",
        "The share of right texts, of prompts with accepted answers. A text is right if it has one of them as whole "
        "words, whatever the case and the punctuation.",
        lambda samples: _mean_terms([one.right for one in samples]),
    ),
    TextMetric(
        "perplexity", "perplexity",
        "e to the mean of -ln p over all drawn tokens, where p is the model's own probability: at temperature 1, over "
        "the whole vocabulary, without edits of logits.",
        partial(_per_token_terms, name="surprisal"), is_exponential=True, logarithmic=True,
    ),
    *(TextMetric(
        f"distinct_{n}", f"distinct-{n}",
        f"Different {n}-grams of tokens divided by all {n}-grams, over a prompt's texts together; the mean over "
        "prompts. It falls with the length of the texts.",
        partial(_distinct_terms, n=n),
    ) for n in (1, 2, 3)),
    TextMetric(
        "self_bleu", "self-BLEU",
        "BLEU-4, over tokens, of a text against the other texts of its prompt, with sacrebleu's smoothing; the mean "
        "over a prompt's texts and over prompts. High means that texts are alike.",
        lambda samples: _mean_terms([self_bleu([one.token_ids for one in samples])]),
    ),
    TextMetric(
        "repetition", "repetition",
        f"The share of a text's {REPEATED_NGRAM}-grams of tokens that occurred earlier in it; the mean over texts.",
        lambda samples: _mean_terms([repeated_share(one.token_ids) for one in samples]),
    ),
    TextMetric(
        "kept_mean", "kept", "Tokens that the rule kept, mean over steps.", partial(_per_token_terms, name="kept"),
        logarithmic=True,
    ),
    TextMetric(
        "mass", "mass", "The kept tokens' share of the probability, mean over steps.",
        partial(_per_token_terms, name="mass"),
    ),
    TextMetric(
        "certified", "certified",
        "The share of certified steps: under Top-W, the kept tokens were proven without token distances; under other "
        "rules, all of them are among the 64 best.",
        partial(_per_token_terms, name="certified"),
    ),
)  # fmt: skip


def summarise(cell: RuleTexts) -> None:
    """Compute the metrics of a cell. All cells use the same resamples of prompts."""
    count = len(cell.samples)
    rng = np.random.default_rng(0)
    weights = rng.multinomial(count, [1 / count] * count, size=RESAMPLES).astype(np.float64)  # [R, P]
    for metric in TEXT_METRICS:
        terms = np.array([metric.terms(samples) for samples in cell.samples], np.float64)  # [P, 2]
        cell.values[metric.name] = quotient_with_interval(terms, weights, is_exponential=metric.is_exponential)


def quotient_with_interval(terms: Floats, weights: Floats, *, is_exponential: bool = False) -> MetricValue:
    """Divide the sum of `terms[:, 0]` by the sum of `terms[:, 1]`, and add a percentile bootstrap interval.

    terms: float64 [P, 2], see `Terms`.
    weights: float64 [R, P], how often each resample has a prompt.
    is_exponential: return e to the power of the quotient.

    Resamples without terms are left out. There is no interval for fewer than two prompts with terms.

    Source: the percentile interval of Efron 1979 ("Bootstrap methods: another look at the jackknife").
    """
    with np.errstate(all="ignore"):
        sums = np.concatenate([terms.sum(axis=0)[None], weights @ terms])  # [1 + R, 2]
        quotients = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], np.nan)  # NaN without terms
        value, *resampled = np.exp(quotients) if is_exponential else quotients
    resampled = [one for one in resampled if np.isfinite(one)]
    if not np.isfinite(value):
        return MetricValue(None)
    if np.count_nonzero(terms[:, 1]) < 2 or not resampled:
        return MetricValue(float(value))
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return MetricValue(float(value), float(low), float(high))


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The report with all texts, in types that JSON has. `compare` continues from it."""
    cells = [
        {
            "rule": cell.rule.label,
            "temperature": cell.temperature,
            "texts": len(cell.texts),
            "tokens": cell.tokens,
            "seconds": cell.seconds,
            "values": {metric.name: asdict(cell.values[metric.name]) for metric in TEXT_METRICS},
            "samples": [
                {"prompt": prompt, "sample": number, **asdict(one)}
                for prompt, samples in enumerate(cell.samples)
                for number, one in enumerate(samples)
            ],
        }
        for cell in comparison.cells
    ]
    return {
        **{each.name: getattr(comparison, each.name) for each in fields(comparison)},
        "folder": str(comparison.folder),
        "rules": [asdict(rule) for rule in comparison.rules],
        "metrics": {metric.name: metric.definition for metric in TEXT_METRICS},
        "intervals": {"level": CONFIDENCE, "over": "prompts", "resamples": RESAMPLES},
        "cells": cells,
    }


def distinct_share(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """The share of different n-grams among all n-grams of `texts`; None without n-grams.

    Source: distinct-n of Li et al. 2016 (arXiv 1510.03055), but divided by the number of n-grams, not of tokens. The
    share falls with the length of the texts.
    """
    grams = [gram for text in texts for gram in zip(*(text[start:] for start in range(n)), strict=False)]
    return len(set(grams)) / len(grams) if grams else None


def repeated_share(tokens: Sequence[int], n: int = REPEATED_NGRAM) -> float | None:
    """The share of the n-grams of a text that occurred earlier in the text; None for fewer than n tokens.

    Source: seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319).
    """
    different = distinct_share([tokens], n)
    return None if different is None else 1 - different


def self_bleu(texts: Sequence[Sequence[int]]) -> float | None:
    """The mean BLEU-4 of each text against all others, in [0, 1]; None for fewer than two texts with tokens.

    Source: Self-BLEU of Zhu et al. 2018 (arXiv 1802.01886). BLEU is sacrebleu's sentence BLEU over token ids, with
    sacrebleu's default smoothing. A text of fewer than four tokens has only the orders up to its length. Texts without
    tokens are left out.
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


def report_lines(comparison: Comparison) -> Iterator[str]:
    """The lines of the report: a title, a table with a row per rule and temperature, and notes."""
    yield title_line(comparison)
    yield ""
    header = ("temperature", "rule", *(metric.title for metric in comparison.metrics), "tokens", "seconds")
    rows = []
    for cell in comparison.cells:
        values = [number_text(cell.values[metric.name].value) for metric in comparison.metrics]
        rows.append((f"{cell.temperature:g}", cell.rule.title, *values, f"{cell.tokens:,}", f"{cell.seconds:.1f}"))
    yield from table(header, rows, left=2).split("\n")
    for note in missing_metric_notes(comparison):
        yield ""
        yield note


def title_line(comparison: Comparison) -> str:
    """What was generated, on one line."""
    end = ", past the end of sequence" if comparison.ignore_eos else ""
    return (
        f"{count_text(len(comparison.prompts), 'prompt')}, {count_text(comparison.samples, 'text')} each, at most "
        f"{count_text(comparison.max_new_tokens, 'token')}{end}; seed {comparison.seed}, {comparison.sampler} sampler"
    )


def missing_metric_notes(comparison: Comparison) -> list[str]:
    """How to get the metrics that are missing."""
    titles = {"logits": "Perplexity", "mass": "Mass"}
    notes = [
        f"{titles[name]} needs the graph's output {name}: export again with --with-{name}."
        for name in comparison.missing_outputs
    ]
    return notes + ["Self-BLEU needs two texts per prompt."] * (comparison.samples == 1)


def number_text(value: float | None) -> str:
    """`value` with three significant digits; "-" for None."""
    return "-" if value is None else significant(value)


_SET_BY_COMPARISON = frozenset({
    *PARAMETER_NAMES, *RULE_PARAMETER_NAMES, "preset", "do_sample", "seed", "num_return_sequences", "logprobs",
    "prompt_logprobs",
})  # fmt: skip
"""Parameters that the comparison sets for all prompts, so a prompt must not set them."""


_SAME_TEXTS = ("model", "provider", "sampler", "seed", "samples", "max_new_tokens", "ignore_eos", "prompts", "answers")
"""What two reports must have in common, so that one can continue the other."""


Prompt: TypeAlias = "tuple[str | list[int] | list[dict[str, Any]], str, Mapping[str, Any]]"
"""(a text, token ids or messages; where it stands, for error messages; its parameters of `TopWModel.generate`, which
are the same under every rule)"""


@dataclass(frozen=True, slots=True)
class Sample:
    """A generated text.

    token_ids: of the text, without an end of sequence.
    drawn: number of drawn tokens, including the end of sequence.
    kept, mass: sizes and probabilities of the kept sets, summed over the drawn tokens; mass is None if the graph has no
        such output.
    certified: number of drawn tokens with a certified kept set.
    surprisal: sum of -log p over the drawn tokens, in nats, where p is the model's probability at temperature 1 without
        edits; None if the graph has no output of logits.
    right: whether the text has an accepted answer; None if its prompt has none.
    """

    text: str
    token_ids: Sequence[int]
    drawn: int
    kept: int
    certified: int
    mass: float | None
    surprisal: float | None
    finish_reason: str
    right: bool | None = None


def _sample(result: GenerationResult, answers: Sequence[str]) -> Sample:
    tokens, scores = result.token_ids, result.token_logprobs
    return Sample(
        text=result.text,
        token_ids=tokens[:-1] if isinstance(result.stop, int) else tokens,
        drawn=len(tokens),
        kept=sum(result.kept),
        certified=sum(result.certified),
        mass=None if result.mass is None else math.fsum(result.mass),
        surprisal=None if scores is None else -math.fsum(entry.logprob for entry in scores),
        finish_reason=result.finish_reason,
        right=is_right(result.text, answers) if answers else None,
    )


_WORD = re.compile(r"[^\W_]+(?:(?:['’]|(?<=\d)[.,:](?=\d))[^\W_]+)*|#+")


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether `text` has one of `answers` as whole words, whatever their case and the punctuation between them.

    A word is a run of letters and digits, with apostrophes and the signs inside numbers ("1,200", "9:30"), or of `#`,
    which GSM8K's format has before its answer.
    """
    words = f" {_words(text)} "
    return any(f" {_words(answer)} " in words for answer in answers)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))


@dataclass(frozen=True, slots=True)
class RuleTexts:
    """The texts of one rule at one temperature.

    samples: the texts of each prompt.
    seconds: wall-clock time of all texts, including reading the prompts and computing log-probabilities.
    values: name -> value of each metric in TEXT_METRICS.
    """

    rule: RuleSetting
    temperature: float
    samples: Sequence[Sequence[Sample]]
    seconds: float
    values: dict[str, MetricValue] = field(default_factory=dict)

    @property
    def texts(self) -> list[Sample]:
        """All texts."""
        return [one for samples in self.samples for one in samples]

    @property
    def tokens(self) -> int:
        """Number of drawn tokens of all texts."""
        return sum(one.drawn for one in self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of `compare`, whose options it has.

    model: digest of the folder's manifest.
    provider, sampler: of the opened model.
    missing_outputs: outputs that the graph lacks: "logits", which perplexity needs, and "mass".
    prompts: the text of each prompt, as the model read it.
    cells: the texts of each rule at each temperature, ordered by temperature, then by rule.
    """

    folder: Path
    model: str
    provider: str
    sampler: str
    seed: int
    samples: int
    max_new_tokens: int
    ignore_eos: bool
    missing_outputs: list[str]
    rules: Sequence[RuleSetting]
    temperatures: Sequence[float]
    prompts: Sequence[str]
    answers: Sequence[Sequence[str]]
    cells: Sequence[RuleTexts]

    @property
    def metrics(self) -> Sequence[TextMetric]:
        """Those that are shown: accuracy only if a prompt has accepted answers."""
        return TEXT_METRICS if any(self.answers) else TEXT_METRICS[1:]


def compare(
    folder: Path,
    prompts: Sequence[Prompt],
    rules: Sequence[RuleSetting],
    temperatures: Sequence[float],
    *,
    answers: Sequence[Sequence[str]] = (),
    samples: int = 4,
    max_new_tokens: int = 64,
    seed: int = 0,
    ignore_eos: bool = False,
    rows: int = 8,
    exact: bool = True,
    opening: Mapping[str, Any] | None = None,
    earlier: Mapping[str, Any] | None = None,
    save: Callable[[Comparison], object] = lambda comparison: None,
    progress: Progress = SILENT,
) -> Comparison:
    """Check all prompts and rules, then generate all texts and compute the metrics.

    folder: an exported model.
    answers: the accepted answers of each prompt; empty where texts have no accuracy.
    samples: number of texts per prompt, rule and temperature.
    max_new_tokens: maximum number of tokens per text, for prompts that set no limit of their own.
    seed: seed of the run. It and the prompt's place give the seed of a prompt, the same for all rules and temperatures.
    ignore_eos: whether a text continues after the end of sequence.
    rows: number of sequences that run at once.
    exact: whether texts must not depend on what ran before; see `Engine`. If not, last bits of logits can.
    opening: options of `TopWModel.from_pretrained`.
    earlier: `as_dict` of a comparison of the same texts; rules at temperatures that it has are not generated again.
    save: called with the comparison after each rule at each temperature.

    Raises PromptError, TokenizerError and ParameterError, which name the prompt, ParameterError for a rule that the
    model refuses, and the errors of `TopWModel` and `Engine`.
    """
    common = {"ignore_eos": ignore_eos, "num_return_sequences": samples}
    with TopWModel.from_pretrained(folder, **(opening or {})) as model:
        has = {"logits": logits_output(model.manifest) is not None,
               "mass": any(spec.name == "mass" for spec in model.manifest.outputs)}  # fmt: skip
        scores = {"logprobs": 0} if has["logits"] else {}
        prepared: list[PromptRequest] = []
        longest, texts = 0, list[str]()
        for place, prompt in enumerate(prompts):
            limit = {} if "max_length" in prompt[2] else {"max_new_tokens": max_new_tokens}
            own = {**common, **limit, **prompt[2], **scores, "seed": prompt_seed(seed, place)}
            ids, budget = _prepare(model, prompt, own)
            prepared.append((ids, own))
            longest = max(longest, len(ids) + budget)
            text = prompt[0] if isinstance(prompt[0], str) else None
            texts.append(model.tokenizer.decode(ids, skip_special_tokens=False) if text is None else text)
        columns = [
            (rule, temperature, {"temperature": temperature, **rule.parameters})
            for temperature in temperatures
            for rule in rules
        ]
        first_ids, first = prepared[0]
        for _, _, parameters in columns:  # refuse a wrong rule or temperature before the first text
            model.prepare(first_ids, **{**first, **parameters})
        cells: list[RuleTexts] = []
        comparison = Comparison(
            folder=folder, model=sha256_of(model.path / MANIFEST_NAME)[:32], provider=model.provider,
            sampler=model.sampler, seed=seed, samples=samples, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos,
            missing_outputs=[name for name in has if not has[name]], rules=rules, temperatures=temperatures,
            prompts=texts, answers=[list(each) for each in answers], cells=cells,
        )  # fmt: skip
        known = _earlier_texts(earlier, comparison) if earlier else {}
        total = len(prepared) * samples * len(columns)
        progress.say(
            f"Generating {count_text(total, 'text')}: {count_text(len(rules), 'rule')} at "
            f"{count_text(len(temperatures), 'temperature')}"
        )
        engine = Runner(model, rows, samples, max_length=longest, exact=exact)
        with closing(engine) as runner, progress.bar(total, "texts") as advance:
            one = {name: value for name, value in first.items() if name != "max_length"}
            one |= {"max_new_tokens": 1, "num_return_sequences": 1}
            list(runner.results([(first_ids, one)]))  # not timed: the first run takes longer
            for rule, temperature, parameters in columns:
                key = (rule.label, None if "temperature" in rule.parameters else temperature)
                if key in known:
                    groups, seconds = known[key]
                    advance(len(prepared) * samples)
                else:
                    started = time.perf_counter()
                    groups = []
                    for found in runner.results((ids, {**own, **parameters}) for ids, own in prepared):
                        results = found if isinstance(found, list) else [found]
                        accepted = answers[len(groups)] if answers else ()
                        groups.append([_sample(result, accepted) for result in results])
                        advance(len(results))
                    seconds = time.perf_counter() - started
                    known[key] = groups, seconds  # of a rule with its own temperature, for the others
                cells.append(RuleTexts(rule, temperature, groups, seconds))
                summarise(cells[-1])
                save(comparison)
        return comparison


def _earlier_texts(
    earlier: Mapping[str, Any], comparison: Comparison
) -> dict[tuple[str, float | None], tuple[list[list[Sample]], float]]:
    """(label of a rule, temperature, or None for a rule with its own) -> (texts, seconds), from a report.

    Raises ParameterError if the report is not of the same texts.
    """
    found: dict[tuple[str, float | None], tuple[list[list[Sample]], float]] = {}
    try:
        for name in _SAME_TEXTS:
            if earlier[name] != getattr(comparison, name):
                raise ParameterError(f"the earlier report has another {name}; write to another file.", "json_file")
        own = {rule["label"] for rule in earlier["rules"] if "temperature" in rule["parameters"]}
        names = [each.name for each in fields(Sample)]
        for cell in earlier["cells"]:
            groups: list[list[Sample]] = [[] for _ in comparison.prompts]
            for sample in cell["samples"]:
                groups[sample["prompt"]].append(Sample(**{name: sample[name] for name in names}))
            place = (cell["rule"], None if cell["rule"] in own else cell["temperature"])
            found[place] = groups, cell["seconds"]
    except (KeyError, IndexError, TypeError) as error:
        raise ParameterError(f"the earlier report is not of `topw compare`: {error!r}.", "json_file") from None
    return found


def _prepare(model: TopWModel, prompt: Prompt, parameters: Mapping[str, Any]) -> tuple[list[int], int]:
    """Encode and check a prompt. Returns (token ids, maximum number of new tokens). Raises errors that name it.

    parameters: those of the prompt and of all prompts, without those of the rule.
    """
    content, where, own = prompt
    for name in own:
        if name in _SET_BY_COMPARISON:
            raise PromptError(f"{where} sets {name}, which a comparison sets for all prompts; remove it.")
    sequence = prepare_prompt(model, content, where, **parameters)
    ids, budget = list(sequence.prompt), sequence.params.budget
    if budget == 0:
        raise PromptError(f"{where} has {len(ids)} tokens and fills the model's context; shorten it.")
    return ids, budget

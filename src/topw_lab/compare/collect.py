"""Generate from every prompt with every rule at every temperature."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topw_deploy.errors import ParameterError, PromptError, TokenizerError
from topw_deploy.manifest import MANIFEST_NAME, sha256_of
from topw_deploy.progress import SILENT, Progress
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.outputs import logits_output
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.runtime.sequence import Sequence as Prepared
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.sampling.seeds import prompt_seed
from topw_deploy.text import count_text
from topw_lab.running import PromptRequest, Runner

_SET_BY_COMPARISON = frozenset({
    *PARAMETER_NAMES, *RULE_PARAMETER_NAMES, "preset", "do_sample", "seed", "num_return_sequences", "logprobs",
    "prompt_logprobs",
})  # fmt: skip
"""Parameters that the comparison sets for all prompts, so a prompt must not set them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a comparison.

    kind: "prompt" (a text), "prompt_ids" or "messages".
    content: the text, the token ids or the messages.
    where: the place of the prompt in its source, for error messages.
    parameters: parameters of `TopWModel.generate` for this prompt, the same under every rule.
    """

    kind: str
    content: Any
    where: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What to compare.

    folder: an exported model.
    samples: number of texts per prompt, rule and temperature.
    max_new_tokens: maximum number of tokens per text, for prompts that set no limit of their own.
    seed: seed of the run. It and the prompt's place give the seed of a prompt, the same for all rules and temperatures.
    ignore_eos: whether a text continues after the end of sequence.
    rows: number of sequences that run at once.
    opening: options of `TopWModel.from_pretrained`.
    """

    folder: Path
    prompts: Sequence[Prompt]
    rules: Sequence[RuleSetting]
    temperatures: Sequence[float]
    samples: int = 4
    max_new_tokens: int = 64
    seed: int = 0
    ignore_eos: bool = False
    rows: int = 8
    opening: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """A generated text.

    tokens: token ids of the text, without an end of sequence.
    drawn: number of drawn tokens, including the end of sequence.
    kept, certified: size and certificate of the crop of each drawn token.
    mass: probability of the crop of each drawn token; None if the graph has no such output.
    surprisal: sum of -log p over the drawn tokens, in nats, where p is the model's probability at temperature 1 without
        edits; None if the graph has no output of logits.
    """

    text: str
    tokens: tuple[int, ...]
    drawn: int
    kept: Sequence[int]
    certified: Sequence[bool]
    mass: Sequence[float] | None
    surprisal: float | None
    finish_reason: str

    @classmethod
    def of(cls, result: GenerationResult) -> Sample:
        """The text of a result of `TopWModel.generate`."""
        tokens, scores = result.token_ids, result.token_logprobs
        return cls(
            text=result.text,
            tokens=tuple(tokens[:-1] if isinstance(result.stop, int) else tokens),
            drawn=len(tokens),
            kept=result.kept,
            certified=result.certified,
            mass=result.mass,
            surprisal=None if scores is None else -math.fsum(entry.logprob for entry in scores),
            finish_reason=result.finish_reason,
        )


@dataclass(frozen=True, slots=True)
class RuleTexts:
    """The texts of one rule at one temperature.

    samples: the texts of each prompt.
    seconds: wall-clock time of all texts, including reading the prompts and computing log-probabilities.
    """

    rule: RuleSetting
    temperature: float
    samples: Sequence[Sequence[Sample]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare`.

    model: digest of the folder's manifest.
    provider, sampler: of the opened model.
    prompts: the text of each prompt, as the model read it.
    cells: the texts of each rule at each temperature, ordered by temperature, then by rule.
    missing: outputs that the graph lacks: "logits", which perplexity needs, and "mass".
    """

    request: CompareRequest
    model: str
    provider: str
    sampler: str
    prompts: Sequence[str]
    cells: Sequence[RuleTexts]
    missing: tuple[str, ...]


def compare(request: CompareRequest, progress: Progress = SILENT) -> Comparison:
    """Check the whole request, then generate all texts.

    Raises PromptError, TokenizerError and ParameterError, which name the prompt, ParameterError for a rule that the
    model refuses, and the errors of `TopWModel` and `Engine`.
    """
    with TopWModel.from_pretrained(request.folder, **request.opening) as model:
        has_logits = logits_output(model.manifest) is not None
        has_mass = any(spec.name == "mass" for spec in model.manifest.outputs)
        missing = [name for name, has in (("logits", has_logits), ("mass", has_mass)) if not has]
        fixed = {"num_return_sequences": request.samples, **({"logprobs": 0} if has_logits else {})}
        prepared: list[PromptRequest] = []
        lengths, texts = [], []
        for place, prompt in enumerate(request.prompts):
            parameters = _parameters(prompt, request, place) | fixed
            sequence = _prepare(model, prompt, parameters)
            ids = list(sequence.prompt)
            prepared.append((ids, parameters))
            lengths.append(len(ids) + sequence.params.budget)
            is_text = prompt.kind == "prompt"
            texts.append(prompt.content if is_text else model.tokenizer.decode(ids, skip_special_tokens=False))
        columns = [
            (rule, temperature, {**rule.parameters, "temperature": temperature})
            for temperature in request.temperatures
            for rule in request.rules
        ]
        first_ids, first = prepared[0]
        for _, _, parameters in columns:  # refuse a wrong rule or temperature before the first text
            model.prepare(first_ids, **{**first, **parameters})
        total = len(prepared) * request.samples * len(columns)
        progress.say(
            f"Generating {count_text(total, 'text')}: {count_text(len(request.rules), 'rule')} at "
            f"{count_text(len(request.temperatures), 'temperature')}"
        )
        # exact=True: a text must not depend on the rules that ran before.
        runner = Runner(model, request.rows, request.samples, max_length=max(lengths), exact=True)
        with runner, progress.bar(total, "texts") as advance:
            one = {name: value for name, value in first.items() if name != "max_length"}
            one |= {"max_new_tokens": 1, "num_return_sequences": 1}
            list(runner.results([(first_ids, one)]))  # not timed: the first run takes longer
            cells = []
            for rule, temperature, parameters in columns:
                started = time.perf_counter()
                results = []
                for found in runner.results((ids, {**own, **parameters}) for ids, own in prepared):
                    results.append(found if isinstance(found, list) else [found])
                    advance(len(results[-1]))
                seconds = time.perf_counter() - started
                samples = [[Sample.of(result) for result in found] for found in results]
                cells.append(RuleTexts(rule, temperature, samples, seconds))
        digest = sha256_of(model.path / MANIFEST_NAME)[:32]
        return Comparison(request, digest, model.provider, model.sampler, texts, cells, tuple(missing))


def _parameters(prompt: Prompt, request: CompareRequest, place: int) -> dict[str, Any]:
    """The parameters of a prompt without those of the rule. place: the prompt's place among all prompts."""
    for name in prompt.parameters:
        if name in _SET_BY_COMPARISON:
            raise PromptError(f"{prompt.where} sets {name}, which a comparison sets for all prompts; remove it.")
    limit = {} if "max_length" in prompt.parameters else {"max_new_tokens": request.max_new_tokens}
    own = {**limit, "ignore_eos": request.ignore_eos, **prompt.parameters}
    return {**own, "seed": prompt_seed(request.seed, place)}


def _prepare(model: TopWModel, prompt: Prompt, parameters: Mapping[str, Any]) -> Prepared:
    """Encode and check a prompt. Raises errors that name the prompt."""
    content = prompt.content
    try:
        if prompt.kind == "messages":
            content = model.tokenizer.encode(model.apply_chat_template(content), add_special_tokens=False)
        sequence = model.prepare(content, **parameters)[0]
    except (PromptError, ParameterError, TokenizerError) as error:
        raise type(error)(f"{prompt.where}: {error}", *error.parameters) from None
    if sequence.params.budget == 0:
        raise PromptError(
            f"{prompt.where} has {len(sequence.prompt)} tokens and fills the model's context; shorten it."
        )
    return sequence

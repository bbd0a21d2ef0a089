"""Generate from every prompt with every rule at every temperature."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError, PromptError, TokenizerError
from topw_deploy.manifest import MANIFEST_NAME, sha256_of
from topw_deploy.plain_text import count_text
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.outputs import logits_output
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.sampling.seeds import prompt_seed

_QUEUED_PER_ROW = 8  # sequences submitted ahead for each row, so that rows stay busy while a long sequence ends
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
        missing = [*(["logits"] if not has_logits else []), *(["mass"] if not _has_mass(model) else [])]
        fixed = {"num_return_sequences": request.samples, **({"logprobs": 0} if has_logits else {})}
        prepared = [
            _prepare_prompt(model, prompt, request, place, fixed) for place, prompt in enumerate(request.prompts)
        ]
        columns = [
            (rule, temperature, {**rule.parameters, "temperature": temperature})
            for temperature in request.temperatures
            for rule in request.rules
        ]
        for _, _, parameters in columns:  # refuse a wrong rule or temperature before the first text
            model.prepare(prepared[0].ids, **{**prepared[0].parameters, **parameters})
        length = max(len(prompt.ids) + prompt.budget for prompt in prepared)
        texts = len(prepared) * request.samples * len(columns)
        progress.say(
            f"Generating {count_text(texts, 'text')}: {count_text(len(request.rules), 'rule')} at "
            f"{count_text(len(request.temperatures), 'temperature')}"
        )
        with (
            TextGenerator(model, request.rows, length, request.samples) as generator,
            progress.bar(texts, "texts") as advance,
        ):
            list(generator.results([prepared[0].for_one_token()]))  # not timed: the first run takes longer
            cells = [
                _generate_texts(generator, prepared, rule, temperature, parameters, advance)
                for rule, temperature, parameters in columns
            ]
        digest = sha256_of(model.path / MANIFEST_NAME)[:32]
        texts_of_prompts = [
            _prompt_text(model, prompt, each.ids) for prompt, each in zip(request.prompts, prepared, strict=True)
        ]
        return Comparison(request, digest, model.provider, model.sampler, texts_of_prompts, cells, tuple(missing))


def _has_mass(model: TopWModel) -> bool:
    return any(spec.name == "mass" for spec in model.manifest.outputs)


def _prepare_prompt(
    model: TopWModel, prompt: Prompt, request: CompareRequest, place: int, fixed: Mapping[str, Any]
) -> PreparedPrompt:
    """Encode and check a prompt. Raises errors that name the prompt.

    place: the prompt's place among all prompts.
    fixed: parameters of every prompt.
    """
    for name in prompt.parameters:
        if name in _SET_BY_COMPARISON:
            raise PromptError(f"{prompt.where} sets {name}, which a comparison sets for all prompts; remove it.")
    limit = {} if "max_length" in prompt.parameters else {"max_new_tokens": request.max_new_tokens}
    parameters = {
        **limit,
        "ignore_eos": request.ignore_eos,
        **prompt.parameters,
        **fixed,
        "seed": prompt_seed(request.seed, place),
    }
    content = prompt.content
    try:
        if prompt.kind == "messages":
            content = model.tokenizer.encode(model.apply_chat_template(content), add_special_tokens=False)
        first = model.prepare(content, **parameters)[0]
    except (PromptError, ParameterError, TokenizerError) as error:
        raise type(error)(f"{prompt.where}: {error}", *error.parameters) from None
    if first.params.budget == 0:
        raise PromptError(f"{prompt.where} has {len(first.prompt)} tokens and fills the model's context; shorten it.")
    return PreparedPrompt(list(first.prompt), parameters, first.params.budget)


def _generate_texts(
    generator: TextGenerator,
    prepared: Sequence[PreparedPrompt],
    rule: RuleSetting,
    temperature: float,
    parameters: Mapping[str, Any],
    advance: Advance,
) -> RuleTexts:
    started = time.perf_counter()
    results_by_prompt = []
    for results in generator.results([prompt.with_parameters(parameters) for prompt in prepared]):
        results_by_prompt.append(results)
        advance(len(results))
    seconds = time.perf_counter() - started
    samples = [[Sample.of(result) for result in results] for results in results_by_prompt]
    return RuleTexts(rule, temperature, samples, seconds)


def _prompt_text(model: TopWModel, prompt: Prompt, ids: Sequence[int]) -> str:
    return prompt.content if prompt.kind == "prompt" else model.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """An encoded prompt.

    ids: token ids.
    parameters: parameters of `TopWModel.generate` without rule and temperature.
    budget: maximum number of new tokens that the parameters and the context allow.
    """

    ids: list[int]
    parameters: Mapping[str, Any]
    budget: int

    def with_parameters(self, parameters: Mapping[str, Any]) -> PreparedPrompt:
        return replace(self, parameters={**self.parameters, **parameters})

    def for_one_token(self) -> PreparedPrompt:
        """The same prompt with a budget of one token, for one text."""
        kept = {name: value for name, value in self.parameters.items() if name != "max_length"}
        return replace(self, parameters={**kept, "max_new_tokens": 1, "num_return_sequences": 1})


class TextGenerator(contextlib.AbstractContextManager["TextGenerator"]):
    """Generates from many prompts: together in an Engine if the model has a static cache, else one by one.

    rows: number of sequences that run at once.
    length: maximum number of tokens of a sequence, including its prompt.
    samples: maximum number of sequences of a request.
    """

    def __init__(self, model: TopWModel, rows: int, length: int, samples: int) -> None:
        self._model, self._ahead = model, max(1, _QUEUED_PER_ROW * rows // samples)
        self._engine: Engine | None = None
        if model.manifest.decoder.kv_form == "static":
            queue = max(_QUEUED_PER_ROW * rows, samples)
            # exact=True: a text must not depend on the rules that ran before.
            self._engine = Engine(
                model, max_batch=rows, max_length=length, max_queue=queue, when_full="wait", exact=True
            )

    def results(self, prompts: Iterable[PreparedPrompt]) -> Iterator[list[GenerationResult]]:
        """Yield the results of each prompt, in order. Raises the first error of a request."""
        if self._engine is None:
            for prompt in prompts:
                yield _as_list(self._model.generate(prompt.ids, **prompt.parameters))
            return
        running: deque[Any] = deque()
        for prompt in prompts:
            running.append(self._engine.submit(prompt.ids, **prompt.parameters))
            if len(running) >= self._ahead:
                yield _as_list(running.popleft().result())
        while running:
            yield _as_list(running.popleft().result())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine. If the block raised, requests that still run are cancelled."""
        if self._engine is not None:
            self._engine.__exit__(kind, error, trace)


def _as_list(results: GenerationResult | list[GenerationResult]) -> list[GenerationResult]:
    return results if isinstance(results, list) else [results]

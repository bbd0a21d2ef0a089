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
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.reports import counted
from topw_deploy.runtime import GenerationResult, TopWModel
from topw_deploy.runtime.logprobs import logits_output
from topw_deploy.runtime.rule_settings import RuleSetting
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.rules import RULE_PARAMETER_NAMES
from topw_deploy.sampling.seeds import prompt_seed

_WAITING = 8  # sequences per row that are submitted ahead, so that a long one does not leave rows idle
_COMPARED = frozenset({
    *PARAMETER_NAMES, *RULE_PARAMETER_NAMES, "preset", "do_sample", "seed", "num_return_sequences", "logprobs",
    "prompt_logprobs",
})  # fmt: skip
"""Parameters that a comparison sets."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    kind: "prompt" (a text), "prompt_ids" or "messages".
    where: its place, for messages.
    parameters: of `TopWModel.generate`, for this prompt under every rule.
    """

    kind: str
    content: Any
    where: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What to compare.

    samples: texts per prompt, rule and temperature.
    max_new_tokens: maximum per text, where a prompt has no other.
    seed: of the run. A prompt's seed depends on it and the prompt's place; all rules and temperatures share it.
    rows: sequences that run at once.
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

    tokens: its token ids, without the one that ended it.
    drawn: number of drawn tokens, with that one. kept, certified and mass have one value for each; mass may be None.
    surprisal: -log p of the drawn tokens under the model at temperature 1, without edits, summed, in nats; or None.
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
class Cell:
    """A rule at a temperature.

    samples: per prompt, its texts.
    seconds: wall-clock time for all of them, including reading the prompts and computing log-probabilities.
    """

    rule: RuleSetting
    temperature: float
    samples: Sequence[Sequence[Sample]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare`.

    model: digest of the folder's manifest.
    prompts: the text of each, as the model read it.
    cells: by temperature, then by rule.
    missing: outputs that the graph lacks: "logits" for perplexity, "mass".
    """

    request: CompareRequest
    model: str
    provider: str
    sampler: str
    prompts: Sequence[str]
    cells: Sequence[Cell]
    missing: tuple[str, ...]


def compare(request: CompareRequest, progress: Progress = SILENT) -> Comparison:
    """Generate all texts. Everything is checked before the first one.

    Raises PromptError, TokenizerError and ParameterError, naming the prompt, ParameterError for a rule that the model
    refuses, and the errors of `TopWModel` and `Engine`.
    """
    with TopWModel.from_pretrained(request.folder, **request.opening) as model:
        has_logits = logits_output(model.manifest) is not None
        missing = [*(["logits"] if not has_logits else []), *(["mass"] if not _has_mass(model) else [])]
        fixed = {"num_return_sequences": request.samples, **({"logprobs": 0} if has_logits else {})}
        asked = [_asked(model, prompt, request, place, fixed) for place, prompt in enumerate(request.prompts)]
        columns = [
            (rule, temperature, {**rule.parameters, "temperature": temperature})
            for temperature in request.temperatures
            for rule in request.rules
        ]
        for _, _, parameters in columns:
            model._requests(asked[0].ids, {**asked[0].parameters, **parameters})
        length = max(len(one.ids) + one.budget for one in asked)
        texts = len(asked) * request.samples * len(columns)
        progress.say(
            f"Generating {counted(texts, 'text')}: {counted(len(request.rules), 'rule')} at "
            f"{counted(len(request.temperatures), 'temperature')}"
        )
        with (
            Generator(model, request.rows, length, request.samples) as generator,
            progress.bar(texts, "texts") as advance,
        ):
            list(generator.results([asked[0].short()]))  # the first run takes longer
            cells = [
                _cell(generator, asked, rule, temperature, parameters, advance)
                for rule, temperature, parameters in columns
            ]
        digest = sha256_of(model.path / MANIFEST_NAME)[:32]
        shown = [_shown(model, prompt, one.ids) for prompt, one in zip(request.prompts, asked, strict=True)]
        return Comparison(request, digest, model.provider, model.sampler, shown, cells, tuple(missing))


def _has_mass(model: TopWModel) -> bool:
    return any(spec.name == "mass" for spec in model.manifest.outputs)


def _asked(model: TopWModel, prompt: Prompt, request: CompareRequest, place: int, fixed: Mapping[str, Any]) -> Asked:
    """The prompt's token ids and parameters, without rule and temperature. Raises errors that name the prompt."""
    for name in prompt.parameters:
        if name in _COMPARED:
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
        rows, _, _ = model._requests(content, parameters)
    except (PromptError, ParameterError, TokenizerError) as error:
        raise type(error)(f"{prompt.where}: {error}", *error.parameters) from None
    if rows[0].budget == 0:
        raise PromptError(f"{prompt.where} has {len(rows[0].prompt)} tokens and fills the model's context; shorten it.")
    return Asked(list(rows[0].prompt), parameters, rows[0].budget)


def _cell(
    generator: Generator,
    asked: Sequence[Asked],
    rule: RuleSetting,
    temperature: float,
    parameters: Mapping[str, Any],
    advance: Advance,
) -> Cell:
    def reported() -> Iterator[list[GenerationResult]]:
        for results in generator.results([one.under(parameters) for one in asked]):
            advance(len(results))
            yield results

    started = time.perf_counter()
    found = list(reported())
    seconds = time.perf_counter() - started
    return Cell(rule, temperature, [[Sample.of(result) for result in results] for results in found], seconds)


def _shown(model: TopWModel, prompt: Prompt, ids: Sequence[int]) -> str:
    return prompt.content if prompt.kind == "prompt" else model.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt's token ids, the parameters of `TopWModel.generate`, and how many tokens they allow."""

    ids: list[int]
    parameters: Mapping[str, Any]
    budget: int

    def under(self, parameters: Mapping[str, Any]) -> Asked:
        return replace(self, parameters={**self.parameters, **parameters})

    def short(self) -> Asked:
        """The same for one token of one text."""
        kept = {name: value for name, value in self.parameters.items() if name != "max_length"}
        return replace(self, parameters={**kept, "max_new_tokens": 1, "num_return_sequences": 1})


class Generator(contextlib.AbstractContextManager["Generator"]):
    """Generates from many prompts: together over an Engine, or one by one if the cache has no form for it.

    rows: sequences that run at once.
    length: maximum tokens of a sequence, with its prompt.
    samples: maximum sequences of a request.
    """

    def __init__(self, model: TopWModel, rows: int, length: int, samples: int) -> None:
        self._model, self._ahead = model, max(1, _WAITING * rows // samples)
        self._engine: Engine | None = None
        if model.manifest.decoder.kv_form == "static":
            queue = max(_WAITING * rows, samples)
            # exact: texts must not depend on which rules ran before.
            self._engine = Engine(
                model, max_batch=rows, max_length=length, max_queue=queue, when_full="wait", exact=True
            )

    def results(self, asked: Iterable[Asked]) -> Iterator[list[GenerationResult]]:
        """The texts of each request, in order. Raises the first error of a request."""
        if self._engine is None:
            for one in asked:
                yield _listed(self._model.generate(one.ids, **one.parameters))
            return
        running: deque[Any] = deque()
        for one in asked:
            running.append(self._engine.submit(one.ids, **one.parameters))
            if len(running) >= self._ahead:
                yield _listed(running.popleft().result())
        while running:
            yield _listed(running.popleft().result())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine, and cancel what still runs if the block failed."""
        if self._engine is not None:
            self._engine.__exit__(kind, error, trace)


def _listed(found: Any) -> list[GenerationResult]:
    return found if isinstance(found, list) else [found]

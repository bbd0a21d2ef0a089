"""Compare what a caller got with what `TopWModel.generate` draws for the same request alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuzz.engine import faults
from fuzz.engine.requests import Arguments
from topw_deploy.errors import (
    GenerationError,
    GrammarError,
    LogitsError,
    ParameterError,
    PromptError,
    QueueFullError,
)
from topw_deploy.runtime import GenerationResult, TopWModel

REASONS = frozenset({"stop", "length", "criterion", "cancelled", "timeout", "error"})
_INTERRUPTED = frozenset({"cancelled", "timeout", "error"})
_ENDED_ENGINE = ("create a new Engine",)


@dataclass
class Outcome:
    """What a caller got for a request.

    given: the arguments of `submit`.
    results: sequence -> result, of the sequences whose end the caller saw.
    error: the error that `submit`, the request or the task raised.
    text: sequence -> text of all its pieces; None if the caller did not read them all.
    own_error: the class of the error that the caller's own callback raised.
    """

    given: Arguments
    results: Mapping[int, GenerationResult] = field(default_factory=dict)
    error: BaseException | None = None
    text: Mapping[int, str] | None = None
    own_error: type[BaseException] | None = None

    @property
    def engine_ended(self) -> bool:
        """Whether the error says that the engine has ended and takes no more requests."""
        return isinstance(self.error, GenerationError) and any(words in str(self.error) for words in _ENDED_ENGINE)

    @property
    def refused(self) -> bool:
        """Whether the engine refused the request because its queue was full."""
        return isinstance(self.error, QueueFullError)


def complaints(outcome: Outcome, model: TopWModel) -> list[str]:
    """What is wrong with an outcome, as lines of text; [] if nothing is."""
    found = _error_complaints(outcome)
    if found or outcome.refused:
        return found
    for index, result in outcome.results.items():
        if result.finish_reason not in REASONS:
            found.append(f"sequence {index} ended for the reason {result.finish_reason!r}")
        if outcome.text is not None and outcome.text[index] != result.text:
            found.append(f"the pieces of sequence {index} are {outcome.text[index]!r}, its text {result.text!r}")
    if _is_replayable(outcome):
        found += _compare(outcome, model)
    return [f"{one}; request {outcome.given!r}" for one in found]


def _error_complaints(outcome: Outcome) -> list[str]:
    error = outcome.error
    if error is None or outcome.engine_ended or outcome.refused:
        return []
    if outcome.own_error is not None and isinstance(error, outcome.own_error):
        return []
    if isinstance(error, (ParameterError, PromptError, GenerationError)) and str(error).rstrip().endswith("."):
        return []
    if isinstance(error, GenerationError) and faults.MESSAGE in str(error):
        return []
    return [f"the error {type(error).__name__}: {error}; request {outcome.given!r}"]


def _is_replayable(outcome: Outcome) -> bool:
    """Whether `generate` alone can give the same outcome. It has no faults, deadlines and bounds of an engine."""
    error = str(outcome.error or "")
    ours = faults.MESSAGE in error or "max_time" in error or "sequences, but the engine takes" in error
    return not (outcome.engine_ended or outcome.own_error or (ours and not outcome.results))


def _compare(outcome: Outcome, model: TopWModel) -> list[str]:
    """Compare with `generate`: finished sequences are equal, interrupted ones begin alike, errors have equal types."""
    given = {name: value for name, value in outcome.given.items() if name != "max_time"}
    error = outcome.error
    injected = error is not None and faults.MESSAGE in str(error)
    try:
        found = model.generate(**given)
    except (ParameterError, PromptError, LogitsError) as alone:
        interrupted = any(result.finish_reason in _INTERRUPTED for result in outcome.results.values())
        if type(alone) is type(error) or injected or (isinstance(alone, LogitsError | GrammarError) and interrupted):
            return []
        return [f"alone it raises {type(alone).__name__}: {alone}, here {error!r}, {dict(outcome.results)}"]
    if error is not None and not injected:
        return [f"it raises {type(error).__name__}: {error}, but not alone"]
    whole: Sequence[GenerationResult] = found if isinstance(found, list) else [found]
    return [
        f"sequence {index} is {_describe_result(result)}, alone {_describe_result(whole[index])}"
        for index, result in outcome.results.items()
        if not _is_consistent(result, whole[index])
    ]


def _is_consistent(result: GenerationResult, whole: GenerationResult) -> bool:
    if result.finish_reason not in _INTERRUPTED:
        return result == whole
    count = len(result.token_ids)
    columns: list[tuple[Any, Any]] = [
        (result.token_ids, whole.token_ids),
        (result.logprobs, whole.logprobs),
        (result.kept, whole.kept),
        (result.mass, whole.mass),
    ]
    return all(some == more[:count] for some, more in columns)


def _describe_result(result: GenerationResult) -> str:
    return f"{result.finish_reason} {result.token_ids} {result.logprobs}"

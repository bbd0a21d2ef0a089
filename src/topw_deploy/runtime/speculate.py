"""Speculation: a run that reads drafted tokens after the last one, and draws after each of them.

A draft is accepted while it equals the draw before it. Draws depend on seed and position only, so the accepted tokens
are those that single steps would draw. A rejected token is overwritten by the next run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from topw_deploy.manifest import ROWS, DecoderManifest
from topw_deploy.runtime.cache.buffers import Buffers, StepRecord
from topw_deploy.runtime.cache.in_place import bind_total
from topw_deploy.runtime.inputs import SamplerInputs, uniforms
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.session import Session

_ORDER = 3  # tokens that must occur again before a draft follows them
_WIDTHS = (2, 3, 4, 6, 8, 12, 16)  # columns of a run
MOST_COLUMNS = _WIDTHS[-1]
_GAIN = 1.05  # a run with drafts must promise so many times a step's tokens per second
_EXTRA_COST = 0.03  # of a column, in steps, before any was measured
_TRIAL = 4  # columns of a run that finds out whether drafts pay by now
_TRIAL_SHARE = 0.02  # of the time of steps, that trials may lose
_MOST_SPARE = 32.0  # steps that trials may lose at once
_FIRST_STEPS = 4  # without drafts, whose times all choices rest on
_RUNS_PER_STEP = 32  # runs with drafts before a step without measures its time again
_SHARED_TOKENS = 1 << 17  # of finished sequences
_KEPT = 0.95  # share of the counts of right drafts that remains at the next comparison of their class
_PRIORS = (0.5, 0.6, 0.8, 0.9, 0.9, 0.9)  # share of right drafts in each class before any comparison
_CLASSES = len(_PRIORS)
_PRIOR_TRIES = 2.0  # comparisons that a prior share counts as


def draws_several(manifest: DecoderManifest) -> bool:
    """Whether the graph can draw after several tokens of a row in one run (docs/contract/graph.md, section 8)."""
    return any(spec.name == "uniform" and spec.shape[:1] == (ROWS,) for spec in manifest.inputs)


class TokenIndex:
    """Finds where some `_ORDER` tokens last occurred in a text."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def add(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        if len(self.tokens) >= _ORDER:
            self._places[tuple(self.tokens[-_ORDER:])] = len(self.tokens)

    def find(self, last: Sequence[int]) -> int:
        """The place after the last occurrence of `last`, `_ORDER` tokens; 0 if there is none."""
        return self._places.get(tuple(last), 0)


class FinishedTexts:
    """The index of finished sequences, which those of an engine share. It starts anew when it is full."""

    def __init__(self) -> None:
        self.index = TokenIndex()

    def add(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a finished sequence."""
        if len(self.index.tokens) + len(tokens) > _SHARED_TOKENS:
            self.index = TokenIndex()
        for token in tokens:
            self.index.add(token)


class DraftSource(ABC):
    """Drafts of one sequence's next tokens.

    needs_trials: whether only runs show how many of its drafts are right.
    """

    needs_trials = False

    @property
    @abstractmethod
    def tokens(self) -> list[int]:
        """The tokens of the sequence."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether there is a draft."""

    @abstractmethod
    def add(self, token: int) -> None:
        """Add the sequence's next token."""

    @abstractmethod
    def draft(self, count: int) -> list[int]:
        """The `count` tokens to draft, zeros where there is no draft."""

    @abstractmethod
    def expected(self, count: int) -> list[float]:
        """The expected number of accepted tokens among the first 0, 1, .. `count` drafted ones."""

    def seconds(self, count: int, drawn: float = math.inf) -> float:
        """The seconds that `draft` takes.

        drawn: number of tokens that bear the cost of a beginning that other drafts share; infinity for all of it.
        """
        return 0.0

    def close(self) -> None:  # noqa: B027  # not abstract: only a draft model has memory to release
        """Release memory."""


class Acceptance:
    """The share of right drafts, in which older ones count less."""

    def __init__(self) -> None:
        self._hits = self._tries = 0.0

    def add(self, hit: bool) -> None:
        """Add a drafted token: whether it was drawn."""
        self._hits, self._tries = _KEPT * self._hits + hit, _KEPT * self._tries + 1

    def rate(self, prior: float) -> float:
        """The share. prior: the share before any draft."""
        return (self._hits + _PRIOR_TRIES * prior) / (self._tries + _PRIOR_TRIES)


class Drafts(DraftSource):
    """Drafts of one sequence's next tokens: those that followed an earlier occurrence of its last tokens.

    Every draw is compared with the first drafted token, whether or not a run has read it, so the share of right ones is
    known for each length of the repetition before speculation is tried.
    """

    def __init__(self, prompt: Sequence[int], finished: FinishedTexts | None = None) -> None:
        self._own, self._finished = TokenIndex(), finished
        self._source: list[int] = []
        self._place = self._matched = 0  # of the next token in `_source`, 0 for none; tokens of the repetition so far
        self._accepted = [Acceptance() for _ in _PRIORS]  # by class
        for token in prompt[:-1]:
            self._own.add(token)
        self.add(prompt[-1])

    def add(self, token: int) -> None:
        if self._place:
            hit = self._source[self._place] == token
            self._accepted[_class_of(self._matched)].add(hit)
            self._place, self._matched = (self._place + 1, self._matched + 1) if hit else (0, 0)
        last = (*self._own.tokens[1 - _ORDER :], token)
        earlier = self._own.find(last)
        self._own.add(token)
        if not self._place or self._place >= len(self._source):
            self._source, self._place, self._matched = self._own.tokens, earlier, _ORDER
            if not earlier and self._finished is not None:
                self._source = self._finished.index.tokens
                self._place = self._finished.index.find(last) % max(1, len(self._source))  # 0 at its end

    def draft(self, count: int) -> list[int]:
        """The tokens to draft. If the text ends before, they start again where the draft starts."""
        if not self._place:
            return [0] * count
        found = self._source[self._place : self._place + count]
        return (found * -(-count // len(found)))[:count]

    @property
    def tokens(self) -> list[int]:
        return self._own.tokens

    @property
    def is_ready(self) -> bool:
        return self._place > 0

    def expected(self, count: int) -> list[float]:
        if not self._place:
            return [0.0] * (count + 1)
        rates = [accepted.rate(prior) for accepted, prior in zip(self._accepted, _PRIORS, strict=True)]
        total, share, sums = 0.0, 1.0, [0.0]
        for matched in range(self._matched, self._matched + count):
            share *= rates[_class_of(matched)]
            total += share
            sums.append(total)
        return sums


def _class_of(matched: int) -> int:
    """The class of a repetition of so many tokens: 3, 4, 8, 16, .. and more."""
    return min(matched.bit_length() - 2, _CLASSES - 1)


class Seconds:
    """The measured time of runs of one shape.

    value: seconds; infinite before they are known.
    runs: number of runs.
    """

    def __init__(self) -> None:
        self.value, self.runs = math.inf, 0

    def add(self, seconds: float) -> None:
        """Add a run's time."""
        runs, old = self.runs, self.value
        # The first run allocates memory. Of the next three the fastest counts, so that a hiccup stops nothing.
        if runs:
            self.value = min(old, seconds) if runs < 4 else old + (min(seconds, 2 * old) - old) / 8
        self.runs += 1

    @property
    def known(self) -> float:
        """The seconds; 0 before they are known."""
        return self.value if math.isfinite(self.value) else 0.0


class RunCosts:
    """The measured seconds of runs of one sequence, by their columns, and what they save.

    Drafts that do not pay are tried again when runs have saved the time, and steps a small share of it.
    """

    def __init__(self) -> None:
        self._runs: defaultdict[int, Seconds] = defaultdict(Seconds)
        self._spare = 0.0  # seconds that trials may lose
        self._since_step = 0  # runs with drafts

    def add(self, columns: int, seconds: float, drawn: int = 1, drafting: float = 0.0) -> None:
        """Add a run's time.

        drawn: number of tokens that the run gave.
        drafting: seconds to draft the tokens that it read.
        """
        self._runs[columns].add(seconds)
        self._since_step = 0 if columns == 1 else self._since_step + 1
        step = self._runs[1].known
        saved = _TRIAL_SHARE * step if columns == 1 else drawn * step - seconds - drafting
        self._spare = max(-_MOST_SPARE * step, min(self._spare + saved, _MOST_SPARE * step))

    def choose(self, drafts: DraftSource, most: int) -> int:
        """The number of columns of the next run, 1 to `most`, that promises the most tokens per second.

        Runs of a new width are at most twice as wide as those that were measured.
        """
        step, is_stale = self._runs[1].value, self._since_step >= _RUNS_PER_STEP
        if not drafts.is_ready or is_stale or self._runs[1].runs < _FIRST_STEPS:
            return 1
        accepted = drafts.expected(MOST_COLUMNS - 1)
        best, best_rate, loss = 1, _GAIN / step, math.inf
        widest, per_column = 2, _EXTRA_COST * step
        for columns in _WIDTHS:
            if columns > min(most, 2 * widest):
                break
            if math.isfinite(cost := self._runs[columns].value):
                widest, per_column = columns, (cost - step) / (columns - 1)
            else:
                cost = step + per_column * (columns - 1)
            drawn = 1 + accepted[columns - 1]
            if (rate := drawn / (cost + drafts.seconds(columns - 1, drawn))) > best_rate:
                best, best_rate = columns, rate
            if columns == _TRIAL and drafts.needs_trials:
                loss = cost + drafts.seconds(columns - 1) - step
        return _TRIAL if best == 1 and loss < self._spare else best


class DraftRun:
    """Runs that read the last token of the first slot and `columns` - 1 drafted ones, and draw after each.

    record: the outputs of the last run, [columns] each.
    """

    def __init__(self, session: Session, inputs: SamplerInputs, buffers: Buffers, columns: int) -> None:
        self._session, self._inputs, self._buffers, self._columns = session, inputs, buffers, columns
        self.record = StepRecord(session.outputs, columns, 1)
        self._ids, self._start = np.zeros((1, columns), np.int64), np.zeros(1, np.int64)
        self._uniform = np.zeros(columns, np.float32)
        self._binding = session.bind()
        self._version = self._length = -1  # of the inputs and buffers that are bound
        self.record.bind(self._binding)
        self._binding.bind_changing("input_ids", self._ids)
        self._binding.bind_changing("write_indices", self._start)
        self._binding.bind_changing("uniform", self._uniform)
        self._binding.bind_array("row_lengths", np.full(1, columns, np.int64))

    def run(self, sequence: GeneratedSequence, start: int, last: int, drafted: Sequence[int]) -> list[int]:
        """Run. Returns the tokens drawn, as far as they follow from accepted ones: 1 to `columns`.

        start: number of tokens in the slot.
        last: the last token, which is not among them.
        """
        if self._version != self._inputs.version:
            self._inputs.bind_repeated(self._binding, self._columns)
            self._version = self._inputs.version
        if self._length != self._buffers.length:
            self._buffers.bind(self._binding, range(1))
            self._length = self._buffers.length
        self._ids[0], self._start[0] = (last, *drafted), start
        self._uniform[:] = uniforms(sequence.params.seed, len(sequence.prompt) + sequence.steps, self._columns)
        bind_total(self._session, self._binding, start + self._columns)
        self._binding.run(0)
        tokens = self.record.store(0)
        wrong = (place for place, token in enumerate(drafted) if token != tokens[place])
        count = 1 + next(wrong, len(drafted))
        sequence.drafted += len(drafted)
        return tokens[:count]

    def close(self) -> None:
        """Release the binding."""
        self._binding.close()

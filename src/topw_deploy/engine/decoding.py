"""The decoding sequences and the tokens they have drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topw_deploy.engine.batch import Batch
from topw_deploy.engine.scheduler import Scheduler
from topw_deploy.engine.sequences import RequestSequence, TokenOutputs


class Group:
    """The sequences of a step. `Decoding` makes a new group when a sequence joins, leaves or moves.

    While every token only lengthens its sequence, the group counts the tokens and `settle` adds them later: each run
    evicts the sequences from the CPU cache, so touching them in every step is slow.

    sequences: in the order of their rows.
    has_scores: whether a sequence has log-probabilities.
    can_pass: whether `passes` can return True.
    """

    def __init__(self, sequences: Sequence[RequestSequence], width: int) -> None:
        """width: number of rows of a step."""
        self.sequences = sorted(sequences, key=lambda sequence: sequence.row)
        self._generations = [sequence.generation for sequence in self.sequences]
        self.has_scores = any(generation.scores is not None for generation in self._generations)
        self.can_pass = len(sequences) == width and all(generation.is_plain for generation in self._generations)
        self._fewest_left = min(generation.tokens_left for generation in self._generations)
        self._ends = frozenset[int]().union(*(one.params.eos_token_ids for one in self._generations))
        self._passed_steps = 0

    def passes(self, tokens: list[int]) -> bool:
        """Count a step's tokens if each only lengthens its sequence, as `Sequence.try_lengthen` does for one sequence.

        Otherwise counts nothing and returns False. Make a new group then.

        tokens: of all rows of a step.
        """
        if self._fewest_left <= 1 or min(tokens) < 0 or not self._ends.isdisjoint(tokens):
            return False
        self._fewest_left -= 1
        self._passed_steps += 1
        return True

    def settle(self) -> None:
        """Add the counted tokens to the sequences."""
        if self._passed_steps:
            for generation in self._generations:
                generation.steps += self._passed_steps
            self._passed_steps = 0


class Decoding:
    """The group of the next step, and the tokens of its sequences. Used only by the engine's thread.

    group: None if a sequence has joined, left or moved since the last step, or must process its token.
    """

    def __init__(self, batch: Batch, scheduler: Scheduler[RequestSequence]) -> None:
        self._batch, self._scheduler = batch, scheduler
        self.group: Group | None = None

    def next_group(self) -> Group:
        """The group of the next step; a new one after `regroup`."""
        if self.group is None:
            self.group = Group(self._scheduler.decoding, self._scheduler.width)
        return self.group

    def regroup(self) -> None:
        """Settle the group, and make a new one for the next step."""
        if self.group is not None:
            self.group.settle()
            self.group = None

    def outputs_of(self, sequence: RequestSequence) -> TokenOutputs:
        """A copy of the sampler's outputs for a sequence's tokens."""
        if self.group is not None:
            self.group.settle()
        if sequence.first_outputs is None:
            return TokenOutputs()
        parts = [sequence.first_outputs]
        ends = [start for _, start in sequence.spans[1:]] + [self._batch.steps]
        for (row, start), end in zip(sequence.spans, ends, strict=False):
            parts += self._batch.recorded_outputs(row, start, end)
        skipped = sequence.generation.discarded_draws
        return TokenOutputs(parts, slice(skipped, skipped + sequence.generation.steps))

    def tokens_in(self, row: int) -> np.ndarray | None:
        """The tokens in a row, int64 [n]; None if the row is not decoding."""
        sequence = self._scheduler.sequence_in(row)
        if sequence is None or not sequence.is_decoding:
            return None
        return tokens_in_cache(sequence, self.outputs_of(sequence))


def tokens_in_cache(sequence: RequestSequence, outputs: TokenOutputs) -> np.ndarray:
    """The tokens in the row of a decoding sequence: all but the last drawn one, int64 [n]."""
    generation = sequence.generation
    prompt = np.array(generation.fed_prompt, np.int64) if generation.discarded_draws else sequence.prompt
    return np.concatenate([prompt, outputs.array("next_token")])[:-1]

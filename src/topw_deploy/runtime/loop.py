"""The generation loop: `prefill`, then `decode_one_token` until all sequences end.

Each run of the graph (decoder and sampler) is one step. The logits and the cache stay on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.inputs import Draws, SamplerInputs
from topw_deploy.runtime.outputs import LogitsBuffer, StepRecord
from topw_deploy.runtime.sequence import Sequence
from topw_deploy.runtime.session import Session


class Batch:
    """B sequences, one per slot, and the arrays and the cache that are bound to the graph. The caller must close it.

    session: what runs the graph.
    active, active_slots: the sequences that have not ended, and their slots.
    step: number of steps so far.
    prefilled_at: when all sequences had their first token, by time.perf_counter(); 0 before.
    last_first_step: the step that draws the last sequence's first token.
    next_ids: the tokens that the next step reads, int64 [B].
    logits: where the graph's logits are copied, for sequences with scores; or None.
    """

    def __init__(
        self, session: Session, caches: Caches, sequences: list[Sequence], logits: LogitsBuffer | None = None
    ) -> None:
        if any(sequence.unread_tokens for sequence in sequences) and not caches.takes_ragged_batches:
            for sequence in sequences:
                sequence.read_one_by_one()
        self.session = session
        params = [sequence.params for sequence in sequences]
        prompts = [sequence.fed_prompt for sequence in sequences]
        budgets = [sequence.params.budget + sequence.unread_tokens for sequence in sequences]
        self.active = list(sequences)
        self.active_slots = [sequence.index for sequence in sequences]
        self.step = 0
        self.prefilled_at = 0.0
        self.last_first_step = max(sequence.discarded_draws for sequence in sequences)
        self.draws = Draws([p.seed for p in params], [p.sample for p in params], [len(p) for p in prompts])
        self.inputs = SamplerInputs(session, len(sequences))
        self.uniform_view = self.inputs.uniform.data
        for sequence in sequences:
            if not sequence.unread_tokens:
                self.inputs.set(sequence.index, sequence)
        self.binding = session.bind()
        self.bound_inputs = self.inputs.bind(self.binding)
        self.logits = logits
        self.record = StepRecord(session.outputs, len(sequences), max(budgets))
        self.record.bind(self.binding)
        self.cache = caches.open(self.binding, prompts, budgets)
        self.next_ids = self.cache.input_ids.reshape(-1).data
        for sequence in sequences:
            self.update_mask(sequence)
            if not sequence.unread_tokens and sequence.params.budget == 0:
                sequence.end("length")
                self.retire(sequence)

    def close(self) -> None:
        """Release the cache and bindings."""
        self.binding.close()  # waits for an interrupted run
        self.cache.close()

    def retire(self, sequence: Sequence) -> None:
        """Make an ended sequence greedy, without rule, edits and mask. It stays in the batch; greedy costs least."""
        self.active.remove(sequence)
        self.active_slots.remove(sequence.index)
        self.next_ids[sequence.index] = sequence.params.pad_token_id
        self.inputs.clear(sequence.index)

    def begin_drawing(self, sequence: Sequence) -> None:
        """Make a sequence draw, with its parameters, edits and mask, from the next run on.

        Raises ParameterError for too many edits.
        """
        self.inputs.set(sequence.index, sequence)
        self.update_mask(sequence)

    def update_mask(self, sequence: Sequence) -> None:
        """Mask the tokens that a sequence's grammar does not allow next."""
        if sequence.guide is not None and not sequence.unread_tokens:
            self.inputs.masks.set(sequence.index, sequence.guide.mask)

    def outputs(self, sequence: Sequence, name: str) -> list[Any]:
        """The sampler's output `name` for a sequence, one value per token; [] if the graph has no such output."""
        first = sequence.discarded_draws
        return self.record.values(name, sequence.index, first + sequence.steps, first)


def steps(batch: Batch) -> Iterator[list[int]]:
    """Yield the drawn tokens [B] of each step, until `accept_tokens` has ended all sequences."""
    if batch.active:
        yield prefill(batch)
    while batch.active:
        yield decode_one_token(batch)


def prefill(batch: Batch) -> list[int]:
    """Run the prompts and draw each sequence's first token. [B, S] -> [B]"""
    columns = batch.cache.feed_prompts()
    if batch.logits is not None:
        batch.logits.bind(batch.binding, columns=columns)
    tokens = run_step(batch)
    batch.cache.begin_decoding()
    return tokens


def decode_one_token(batch: Batch) -> list[int]:
    """Feed each sequence's last token and draw the next. [B, 1] -> [B]"""
    batch.cache.advance(batch.active_slots)
    if batch.logits is not None and batch.logits.columns != 1:
        batch.logits.bind(batch.binding)
    return run_step(batch)


def run_step(batch: Batch) -> list[int]:
    """Draw uniforms, run the graph and record its outputs. Returns the tokens [B]."""
    b = batch
    b.draws.write(b.step, b.uniform_view)
    if b.inputs.edits.is_active:
        b.inputs.edits.write_bans()
    b.inputs.update(b.bound_inputs)
    b.binding.run(b.step)
    tokens = b.record.store(b.step)
    b.step += 1
    return tokens


def accept_tokens(batch: Batch, tokens: list[int]) -> list[tuple[Sequence, str]]:
    """Give each sequence its drawn token. Returns the sequences that gained text or ended, with the new text.

    Raises LogitsError for invalid logits.
    """
    b = batch
    changed = []
    for sequence in b.active:
        slot = sequence.index
        logits = b.logits.row(slot) if b.logits is not None and sequence.needs_logits else None
        if sequence.unread_tokens:
            b.next_ids[slot] = sequence.read_prompt_token(logits)
            if sequence.finish_reason is not None:
                changed.append((sequence, ""))
            elif not sequence.unread_tokens:
                b.begin_drawing(sequence)
            continue
        token = tokens[slot]
        if token < 0:
            raise sequence.invalid_draw_error(f"row {slot}")
        if b.inputs.edits.is_active:
            b.inputs.edits.add_token(slot, token)
        gained = sequence.add_token(token, logits)
        b.next_ids[slot] = token
        b.update_mask(sequence)
        if gained or sequence.finish_reason is not None:
            changed.append((sequence, gained))
    for sequence, _ in changed:
        if sequence.finish_reason is not None:
            b.retire(sequence)
    if b.step <= b.last_first_step + 1:
        b.prefilled_at = time.perf_counter()
    return changed

"""The generation loop: `prefill`, then `decode_one_token` until all sequences end; and what each step returns.

Each run of the graph (decoder and sampler) is one step. The logits and the cache stay on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.manifest import DecoderManifest, TensorSpec
from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.cache.buffers import StepRecord, allocate_zeros
from topw_deploy.runtime.cache.in_place import StaticCache
from topw_deploy.runtime.draft_model import DraftModel, new_drafts
from topw_deploy.runtime.inputs import Draws, SamplerInputs
from topw_deploy.runtime.sequence import Sequence
from topw_deploy.runtime.session import Binding, Session
from topw_deploy.runtime.speculate import DraftRun, DraftSource, RunCosts


class Batch:
    """B sequences, one per slot, and the arrays and the cache that are bound to the graph. The caller must close it.

    session: what runs the graph.
    active, active_slots: the sequences that have not ended, and their slots.
    step: number of steps so far.
    prefilled_at: when all sequences had their first token, by time.perf_counter(); 0 before.
    last_first_step: the step that draws the last sequence's first token.
    next_ids: the tokens that the next step reads, int64 [B].
    logits: where the graph's logits are copied, for sequences with scores; or None.
    drafts: of the only sequence; None without speculation.
    """

    def __init__(
        self,
        session: Session,
        caches: Caches,
        sequences: list[Sequence],
        logits: LogitsBuffer | None = None,
        costs: RunCosts | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """costs: the measured times of the session's runs; None if the graph cannot speculate."""
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
        self.draws = Draws([p.seed for p in params], [len(p) for p in prompts])
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
        speculates = costs is not None and len(sequences) == 1 and sequences[0].speculates
        self.costs = costs
        self.drafts = new_drafts(sequences[0], sequences[0].prompt, draft_model) if speculates else None
        self.draft_runs: dict[int, DraftRun] = {}  # by columns
        for sequence in sequences:
            self.update_mask(sequence)
            if not sequence.unread_tokens and sequence.params.budget == 0:
                sequence.end("length")
                self.retire(sequence)

    def close(self) -> None:
        """Release the cache and bindings."""
        self.binding.close()  # waits for an interrupted run
        for run in self.draft_runs.values():
            run.close()
        if self.drafts is not None:
            self.drafts.close()
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
        if batch.drafts is not None and batch.costs is not None:
            yield from speculate(batch, batch.drafts, batch.costs)
        else:
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


def speculate(batch: Batch, drafts: DraftSource, costs: RunCosts) -> Iterator[list[int]]:
    """Read the last token with drafts after it, and yield the tokens [1] of each step that follows from accepted ones.

    Where drafts do not pay, this is `decode_one_token`.
    """
    b, (sequence,), cache, began = batch, batch.active, batch.cache, time.perf_counter()
    assert isinstance(cache, StaticCache)
    last = b.next_ids[0]
    drafts.add(last)
    columns = costs.choose(drafts, min(cache.columns_left, sequence.tokens_left))
    if columns == 1:
        tokens = decode_one_token(b)
        costs.add(1, time.perf_counter() - began)
        yield tokens
        return
    drafted = drafts.draft(columns - 1)
    drafting, began = time.perf_counter() - began, time.perf_counter()
    cache.advance([0], columns)
    run = b.draft_runs.get(columns)
    if run is None:
        run = b.draft_runs[columns] = DraftRun(b.session, b.inputs, cache.buffers, columns)
    drawn = run.run(sequence, int(cache.last_indices[0]), last, drafted)
    cache.skip([0], len(drawn) - 1)
    b.record.store_draws(b.step, run.record, len(drawn))
    costs.add(columns, time.perf_counter() - began, len(drawn), drafting)
    for index, token in enumerate(drawn):
        if index:
            drafts.add(drawn[index - 1])
            sequence.accepted += 1
        b.step += 1
        yield [token]
        if not b.active:
            return


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


LOGITS_OUTPUT = "logits"


class LogitsBuffer:
    """The graph's output `logits` for a batch, on the host.

    spec: float [batch, V], or, in another exporter's decoder, [batch, columns, V], where the last column is that of
        each slot's last token.
    """

    def __init__(self, spec: TensorSpec, slots: int, vocab: int) -> None:
        self._slots, self._vocab = slots, vocab
        self._dtype = np.dtype(ELEMENT_TYPES[spec.dtype].numpy)
        self._has_columns = len(spec.shape) == 3
        self.columns = 1
        self._array = self._allocate()

    def bind(self, binding: Binding, slots: slice = slice(None), columns: int = 1) -> None:
        """Make the next runs of `binding` write the logits of adjacent `slots`.

        columns: of the runs' `input_ids`.
        """
        if self._has_columns and self.columns != columns:
            self.columns = columns
            self._array = self._allocate()
        binding.bind_result(LOGITS_OUTPUT, self._array[slots])

    def row(self, slot: int) -> np.ndarray:
        """The logits after a slot's last token: float [V], valid until the next run."""
        found: np.ndarray = self._array[slot, -1] if self._has_columns else self._array[slot]
        return found

    def _allocate(self) -> np.ndarray:
        shape = (self._slots, self.columns, self._vocab) if self._has_columns else (self._slots, self._vocab)
        return allocate_zeros("the logits", shape, self._dtype.type)


def logits_output(manifest: DecoderManifest) -> TensorSpec | None:
    """The description of the graph's output `logits`; None if the graph does not return logits."""
    return next((spec for spec in manifest.outputs if spec.name == LOGITS_OUTPUT), None)


def gives_logits(manifest: DecoderManifest) -> bool:
    """Whether the graph has the output `logits` (`--with-logits`), in a type that numpy reads."""
    spec = logits_output(manifest)
    return spec is not None and bool(ELEMENT_TYPES[spec.dtype].numpy)

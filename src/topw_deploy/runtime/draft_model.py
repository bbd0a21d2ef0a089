"""Drafts by a smaller model of the same vocabulary, which draws each token as the target will.

It draws with the sequence's parameters and with the random number of the token's position, so where the two models'
distributions are similar, both draw the same token at any temperature.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from topw_deploy.errors import ParameterError
from topw_deploy.manifest import DecoderManifest, ModelFolder
from topw_deploy.runtime.cache.buffers import Buffers, MemoryPool, StepRecord
from topw_deploy.runtime.cache.in_place import DEFAULT_CHUNK, bind_total
from topw_deploy.runtime.inputs import SamplerInputs, uniforms
from topw_deploy.runtime.sequence import Sequence as GeneratedSequence
from topw_deploy.runtime.session import Session
from topw_deploy.runtime.speculate import Acceptance, Drafts, DraftSource, FinishedTexts, Seconds, draws_several
from topw_deploy.runtime.tokenizer import Tokenizer

_PRIOR = 0.7  # share of right drafts before any comparison
_USUAL_LENGTH = 256  # tokens of an answer, at most, that the reading of its prompt must pay for
_FEW = 2  # tokens that a step reads at little additional cost
_TOKEN_SHARE = 0.1  # before it was measured


class DraftModel:
    """An open draft model. Several generations may use it at once.

    vocab_size: number of tokens that both models have.
    chunk: maximum tokens of a run.
    step: the seconds of a run of one token.
    token_share: the time of another token in a long run, in steps.
    accepted: the share of right drafts in all sequences.
    """

    def __init__(self, session: Session, manifest: DecoderManifest, vocab_size: int) -> None:
        """vocab_size: of the target."""
        decoder = manifest.decoder
        self.session, self.pool = session, MemoryPool(session, decoder)
        self.context_length = decoder.context_length
        self.vocab_size = min(vocab_size, manifest.sampler.vocab_size)
        self.chunk = min(DEFAULT_CHUNK, session.most_columns or DEFAULT_CHUNK, decoder.most_columns or DEFAULT_CHUNK)
        self.step, self.token_share, self.accepted = Seconds(), _TOKEN_SHARE, Acceptance()


class ModelDrafts(DraftSource):
    """The drafts of a sequence by a draft model.

    The model's cache holds the beginning of the text, and drafted tokens after it. Rejected ones are overwritten.
    """

    needs_trials = True

    def __init__(self, tokens: Sequence[int], sequence: GeneratedSequence, model: DraftModel) -> None:
        """tokens: of the sequence so far."""
        self._tokens, self._sequence, self._model = list(tokens), sequence, model
        self._end = min(len(sequence.prompt) + sequence.params.budget, model.context_length)
        self._read = 0  # number of tokens in the cache
        self._drafted: list[int] = []  # those that no drawn token was compared with
        self._accepted = Acceptance()
        self._buffers: Buffers | None = None  # until the first draft

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def is_ready(self) -> bool:
        return len(self._tokens) < self._end

    def add(self, token: int) -> None:
        if self._drafted:
            hit = self._drafted.pop(0) == token
            self._accepted.add(hit)
            self._model.accepted.add(hit)
            if not hit:
                self._drafted.clear()
                self._read = min(self._read, len(self._tokens))
        self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        model, tokens, start = self._model, self._tokens, self._read
        if self._buffers is None:
            self._open()
        last = tokens[start + (len(tokens) - start - 1) // model.chunk * model.chunk :]
        for begin in range(start, len(tokens) - len(last), model.chunk):
            self._run(tokens[begin : begin + model.chunk], begin, 0.0)
        numbers = uniforms(self._sequence.params.seed, len(tokens), count).tolist()
        drafted: list[int] = []
        for number in numbers[: self._end - len(tokens)]:
            drafted.append(self._run(last, len(tokens) + len(drafted) - len(last), number))
            last = drafted[-1:]
        self._read, self._drafted = len(tokens) + len(drafted) - 1, list(drafted)
        return drafted + [0] * (count - len(drafted))

    def expected(self, count: int) -> list[float]:
        rate = self._accepted.rate(self._model.accepted.rate(_PRIOR))
        sums = [0.0]
        for place in range(count):
            sums.append(sums[-1] + (rate ** (place + 1) if len(self._tokens) + place < self._end else 0.0))
        return sums

    def seconds(self, count: int, drawn: float = math.inf) -> float:
        step, unread = self._model.step.known, max(0, len(self._tokens) - self._read - _FEW)
        share = min(1.0, drawn / max(1, min(self._end - len(self._tokens), _USUAL_LENGTH)))
        return count * step + share * unread * self._model.token_share * step

    def close(self) -> None:
        if self._buffers is not None:
            self._binding.close()
            self._model.pool.give_back(self._buffers)
            self._buffers = None

    def _open(self) -> None:
        session = self._model.session
        self._buffers = self._model.pool.borrow(1, self._end, min(len(self._tokens), self._model.chunk))
        self._binding = session.bind()
        self._buffers.bind(self._binding)
        self._inputs = SamplerInputs(session, 1)
        self._inputs.set(0, self._sequence)
        self._inputs.bind(self._binding)
        self._record = StepRecord(session.outputs, 1, 1)
        self._record.bind(self._binding)
        self._start, self._length = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._binding.bind_changing("write_indices", self._start)
        self._binding.bind_changing("row_lengths", self._length)

    def _run(self, ids: Sequence[int], start: int, number: float) -> int:
        """Read `ids` after the first `start` tokens of the cache, and draw the next token with the random `number`."""
        model, buffers, end, began = self._model, self._buffers, start + len(ids), time.perf_counter()
        assert buffers is not None
        if end > buffers.length:
            model.pool.make_room(buffers, end)
            buffers.bind(self._binding)
        self._start[0], self._length[0], self._inputs.uniform[0] = start, len(ids), number
        known = [token if token < model.vocab_size else 0 for token in ids]
        self._binding.bind_array("input_ids", np.array([known], np.int64))
        bind_total(model.session, self._binding, end)
        self._binding.run(0)
        seconds, step = time.perf_counter() - began, model.step.known
        if len(ids) == 1:
            model.step.add(seconds)
        elif len(ids) > _FEW and step:
            model.token_share = min(1.0, max(0.0, seconds / step - 1) / len(ids))
        token = self._record.tokens[0]
        return token if 0 <= token < model.vocab_size else 0  # -1: the logits are invalid


def new_drafts(
    sequence: GeneratedSequence,
    tokens: Sequence[int],
    model: DraftModel | None,
    finished: FinishedTexts | None = None,
) -> DraftSource:
    """The drafts of a sequence that speculates.

    tokens: of the sequence so far.
    model: the draft model, if there is one.
    finished: texts of other sequences to draft from.
    """
    if model is not None and sequence.params.speculate == "model":
        return ModelDrafts(tokens, sequence, model)
    return Drafts(tokens, finished)


def check_draft_model(draft: ModelFolder[DecoderManifest], target: ModelFolder[DecoderManifest]) -> None:
    """Raises ParameterError unless the model `draft` can draft the tokens of `target`."""
    decoder, missing = draft.manifest.decoder, set(target.manifest.sampler.rules) - set(draft.manifest.sampler.rules)
    why = ""
    if not draws_several(target.manifest):
        why = f"{target.path} cannot draw several tokens in a run; omit draft_model, or export {target.path} again"
    elif decoder.kv_form != "static":
        why = f"its cache is {decoder.kv_form} and not static; export its checkpoint with topw-export, without --kv"
    elif decoder.recurs:
        why = "it has states of fixed size, which cannot go back after a rejected token; give a model without"
    elif missing:
        why = f"it lacks the rules {', '.join(sorted(missing))}; export it again with all --rules of {target.path}"
    elif not Tokenizer(draft).has_tokens_of(Tokenizer(target)):
        why = f"its tokenizer has other tokens than that of {target.path}; give a smaller model of the same family"
    if why:
        raise ParameterError(f"draft_model is {draft.path}, but {why}.", "draft_model")

"""A session without onnxruntime. The next token is a hash of all that a row should have: the tokens in its cache with
their positions, its other states, its parameters, edits and random number. So any mix-up of rows changes the tokens.

Token INVALID writes states that are not finite: logits after it are NaN.
"""

from __future__ import annotations

import copy
import ctypes
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from topw_deploy.errors import GenerationError
from topw_deploy.manifest import DecoderInfo, State
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.cache import Caches
from topw_deploy.runtime.cache.buffers import HostMemory
from topw_deploy.runtime.ort.graph_session import SAMPLER_INPUTS
from topw_deploy.runtime.prepare import Limits
from topw_deploy.sampling.parameters import PARAMETER_NAMES
from topw_deploy.sampling.row import mask_words

CONTEXT = 24
EOS, FIRST, TOKENS, INVALID = 1, 3, 5, 9
"""Drawn tokens are FIRST .. FIRST + TOKENS - 1, or EOS now and then."""
_NAN = -999
_WINDOW = 4

_KEYS = State(layer=0, kind="full", past="past.keys", present="present.keys", dtype="int64", shape=(1, 0, 1))
_SUM = State(layer=1, kind="recurrent", past="past.sum", present="present.sum", dtype="int64", shape=(1,))
_LAST = State(
    layer=1, kind="window", past="past.last", present="present.last", dtype="int64", shape=(_WINDOW,), window=_WINDOW
)
FORMS: dict[str, dict[str, Any]] = {
    "keys": {"states": (_KEYS,)},
    "growing": {"states": (_KEYS,), "buffer_step": 4},
    "recurrent": {"states": (_KEYS, _SUM)},
    "growing recurrent": {"states": (_KEYS, _SUM), "buffer_step": 4},
    "window": {"states": (_KEYS, _LAST)},
}


def hashing_model(model: TopWModel, form: str) -> TopWModel:
    """`model` with a HashingSession in place of its own."""
    found = copy.copy(model)
    decoder = replace(model.manifest.decoder, ragged_chunks=False, context_length=CONTEXT, **FORMS[form])
    session = HashingSession(decoder, mask_words(model.manifest.sampler.vocab_size))
    found.manifest = replace(model.manifest, decoder=decoder)
    found._decoder, found._session, found._caches = decoder, session, Caches(session, decoder)
    found._preparer = copy.copy(model._preparer)
    found._preparer.limits = Limits(CONTEXT, model.manifest.sampler.vocab_size)
    return found


class HashingSession:
    """fault: called at the beginning and at the end of each run; may raise."""

    provider, sampler, why_graph = "CPUExecutionProvider", "graph", ""
    cpu_nodes = ()
    outputs = ("next_token", "logprob", "kept", "certified")
    inputs = frozenset(SAMPLER_INPUTS)
    fixed_edits = most_rows = most_columns = most_edits = None

    def __init__(self, decoder: DecoderInfo, words: int) -> None:
        self.decoder = decoder
        self.mask_words, self.always_masked, self.attends_alone = words, False, False
        self.fault: Callable[[str], None] = lambda when: None

    def bind(self) -> HashingBinding:
        return HashingBinding(self)

    def memory(self, size: int) -> HostMemory:
        return HostMemory(size)


class HashingBinding:
    def __init__(self, session: HashingSession) -> None:
        self._session = session
        self._arrays: dict[str, np.ndarray] = {}
        self._states: dict[str, np.ndarray] = {}
        self._results: dict[str, np.ndarray] = {}

    def bind_array(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array

    bind_changing = bind_on_host = bind_array

    def bind_result(self, name: str, array: np.ndarray) -> None:
        self._results[name] = array

    def bind_memory(self, source: str, target: str, element_type: int, shape: Sequence[int], pointer: int) -> None:
        count = int(np.prod(shape))
        self._states[source] = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(pointer)).reshape(shape)

    def refresh(self, name: str) -> None:
        """Runs read the arrays themselves."""

    def new_sibling(self) -> HashingBinding:
        return HashingBinding(self._session)

    def close(self) -> None:
        self._states.clear()

    def run(self, step: int | None = None) -> None:
        self._session.fault("before")
        ids, starts, lengths = (self._arrays[name] for name in ("input_ids", "write_indices", "row_lengths"))
        for row in range(len(ids)):
            seen = self._absorb(row, ids[row].tolist(), int(starts[row]), int(lengths[row]))
            if self._results:
                self._draw(row, seen)
        self._session.fault("after")

    def _absorb(self, row: int, ids: list[int], start: int, count: int) -> list[Any]:
        """Update a row's states. Returns what its logits depend on."""
        keys = self._states["past.keys"][row, 0, :, 0]
        for index, token in enumerate(ids[: len(keys) - start]):  # a row of no tokens writes a slot too
            absorbed = index < count
            keys[start + index] = (_NAN if token == INVALID else 1000 * (token + 1) + start + index) if absorbed else -1
        seen = keys[: start + count].tolist()
        if self._session.decoder.buffer_step and _NAN in keys:  # 0 * NaN in masked slots
            return [_NAN]
        if "past.sum" in self._states:
            total = self._states["past.sum"][row]
            for token in ids[:count]:
                total[0] = _NAN if _NAN in total or token == INVALID else (31 * total[0] + token) % 2**31
            seen += total.tolist()
        if "past.last" in self._states:
            assert count, "a window takes a token of every row"
            last = self._states["past.last"][row]
            for token in ids[:count]:
                last[:] = [*last[1:], token]
            seen += last[-min(_WINDOW, start + count) :].tolist()
        return seen

    def _mask(self, row: int) -> list[int]:
        """The words of a row's mask; [] if it allows everything."""
        words: list[int] = self._arrays["allowed"][row].tolist()
        return [] if all(word == -1 for word in words) else words

    def _draw(self, row: int, seen: list[Any]) -> None:
        edits = sorted(
            (token, penalty, bias)
            for token, penalty, bias in zip(
                *(self._arrays[name][row].tolist() for name in ("edit_ids", "edit_penalty", "edit_bias")), strict=True
            )
            if token >= 0 and (penalty, bias) != (1.0, 0.0)
        )
        parameters = [float(self._arrays[name][row]) for name in (*PARAMETER_NAMES, "uniform", "rule")]
        parameters += self._arrays["rule_values"][row].tolist()
        number = zlib.crc32(repr((seen, edits, parameters, self._mask(row))).encode())
        banned = {token for token, _, bias in edits if bias == -np.inf}
        order = [EOS] * (number % 11 == 0) + [FIRST + (number + more) % TOKENS for more in range(TOKENS)]
        words = self._mask(row)
        free = [t for t in order if t not in banned and (not words or words[t // 32] >> t % 32 & 1)]
        results = self._results
        results["next_token"][row] = -1 if _NAN in seen or not free else free[0]
        results["logprob"][row], results["kept"][row] = -(number % 1000) / 1000, number % 9 + 1
        results["certified"][row] = bool(number % 2)


def failing_once(when: str, then: Callable[[], None]) -> Callable[[str], None]:
    """A fault of the next run, at its beginning ("before") or end ("after"). then: called before it raises."""

    def fault(now: str) -> None:
        if now == when:
            then()
            raise GenerationError("injected.")

    return fault

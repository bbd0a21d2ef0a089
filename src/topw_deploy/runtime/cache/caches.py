"""What a model keeps for the caches of its generations, and the face that every form of cache shows the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from topw_deploy.manifest import DecoderInfo
from topw_deploy.runtime.cache.buffers import BufferPool
from topw_deploy.runtime.cache.concat import ConcatCache
from topw_deploy.runtime.cache.in_place import InPlaceCache
from topw_deploy.runtime.cache.shared import SharedCache
from topw_deploy.runtime.cache.static import StaticCache
from topw_deploy.runtime.face import Binding, Session
from topw_deploy.runtime.session import Binding as GraphBinding
from topw_deploy.runtime.session import OpenGraph

DEFAULT_CHUNK = 1024  # tokens in one run: longer ones take more memory and are no faster


class Cache(Protocol):
    """The cache of one generation, with the inputs that go with its form.

    `feed_prompts` once, then the run that draws; `begin_decoding` once; then `advance` before the run of every step.
    """

    input_ids: np.ndarray
    """[B, 1] what the next step feeds: to be written between `begin_decoding` or a run and `advance`."""

    def feed_prompts(self) -> None:
        """Run all of the prompts but their last piece, drawing nothing, and bind that piece: the next run draws."""

    def begin_decoding(self) -> None:
        """Bind what a step of one token per row feeds."""

    def advance(self, rows: Iterable[int]) -> None:
        """Make place for one more token in each of `rows`; the others have ended and write over their last one."""


class Caches:
    """The caches of all generations on one session.

    max_length, max_batch: what buffers are set aside for at once, see `BufferPool`. prefill_chunk: most tokens, of
    all rows together, that one run takes.
    """

    def __init__(
        self,
        session: Session,
        decoder: DecoderInfo,
        *,
        max_length: int | None = None,
        max_batch: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self._session, self._decoder = session, decoder
        self._chunk = prefill_chunk or DEFAULT_CHUNK
        self._pool: BufferPool | None = None
        if decoder.kv_form != "concat":
            self._pool = BufferPool(session, decoder, max_length, max_batch)

    @property
    def bytes(self) -> int:
        """Of the buffers set aside or in use; 0 for concat, whose caches are onnxruntime's."""
        return 0 if self._pool is None else self._pool.bytes

    def open(self, binding: Binding, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> Cache:
        """A cache for one row per prompt with up to so many tokens after it; to be closed."""
        if self._pool is None:  # whose caches are onnxruntime's own values
            assert isinstance(self._session, OpenGraph)
            assert isinstance(binding, GraphBinding)
            return ConcatCache(self._session, binding, self._decoder, prompts, max(budgets), self._chunk)
        form = StaticCache if self._decoder.kv_form == "static" else SharedCache
        return form(self._session, binding, self._decoder, self._pool, prompts, budgets, self._chunk)

    def close(self, cache: Cache) -> None:
        """Let others have the memory of `cache`, which is used no more."""
        if isinstance(cache, InPlaceCache):
            cache.close()


def takes_ragged_batches(decoder: DecoderInfo) -> bool:
    """Whether prompts of different lengths may share a batch."""
    takes = {"static": True, "concat": decoder.left_padding, "shared": decoder.right_padding}
    return takes[decoder.kv_form]

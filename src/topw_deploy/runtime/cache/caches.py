"""Open and check caches of any form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import KV_FORMS, DecoderInfo, TensorSpec
from topw_deploy.runtime.cache.buffers import CACHE_TYPES, MemoryPool
from topw_deploy.runtime.cache.concat import ConcatCache
from topw_deploy.runtime.cache.in_place import InPlaceCache, SharedCache, StaticCache
from topw_deploy.runtime.ort.host_binding import HostBinding
from topw_deploy.runtime.protocols import Binding, Session

DEFAULT_CHUNK = 1024  # tokens per run; more is no faster
_INPUTS = {
    "concat": ("input_ids",),
    "static": ("input_ids", "write_indices", "row_lengths"),
    "shared": ("input_ids", "attention_mask"),
}


class Cache(Protocol):
    """One generation's cache. Call `feed_prompts`, run, `begin_decoding`; then for each step `advance` and run.

    input_ids: int64 [B, 1], the next tokens; write them before `advance`.
    """

    input_ids: np.ndarray

    def feed_prompts(self) -> int:
        """Run all prompt chunks except the last, and bind the last. Returns its columns."""

    def begin_decoding(self) -> None:
        """Bind the inputs of a step, one token per row."""

    def advance(self, rows: Iterable[int]) -> None:
        """Make room for one token in `rows`. The other rows, which have ended, overwrite their last token."""


class Caches:
    """Opens a session's caches.

    max_length, max_batch: `length` and `rows` of `MemoryPool`.
    prefill_chunk: maximum tokens per run, over all rows.
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
        self.takes_ragged_batches = takes_ragged_batches(decoder)
        self._chunk = prefill_chunk or DEFAULT_CHUNK
        self._pool: MemoryPool | None = None
        if decoder.kv_form != "concat":
            self._pool = MemoryPool(session, decoder, max_length, max_batch)

    @property
    def bytes(self) -> int:
        """Size of the buffers; 0 for concat (owned by onnxruntime)."""
        return 0 if self._pool is None else self._pool.bytes

    def open(self, binding: Binding, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> Cache:
        """Open a cache with a row per prompt and room for `budgets[row]` more tokens. The caller must close it."""
        if self._pool is None:
            assert isinstance(binding, HostBinding), "only onnxruntime's sessions have caches of the form concat"
            return ConcatCache(self._session, binding, self._decoder, prompts, max(budgets), self._chunk)
        form = StaticCache if self._decoder.kv_form == "static" else SharedCache
        return form(self._session, binding, self._decoder, self._pool, prompts, budgets, self._chunk)

    def close(self, cache: Cache) -> None:
        if isinstance(cache, InPlaceCache):
            cache.close()


def takes_ragged_batches(decoder: DecoderInfo) -> bool:
    """Whether the prompts of a batch may differ in length."""
    takes = {"static": True, "concat": decoder.left_padding, "shared": decoder.right_padding}
    return takes[decoder.kv_form]


def check_supported(decoder: DecoderInfo, inputs: frozenset[str], outputs: tuple[str, ...]) -> None:
    """Raises ManifestError for an unsupported cache form or element type, or missing cache tensors."""
    if decoder.kv_form not in _INPUTS:
        raise ManifestError(
            f"the cache has the form {decoder.kv_form!r}, but this topw_deploy supports {', '.join(KV_FORMS)}; "
            "install a newer one."
        )
    for state in decoder.states:
        if state.dtype not in CACHE_TYPES:
            raise ManifestError(
                f"{state.past} has the element type {state.dtype!r}, which is not one of {', '.join(CACHE_TYPES)}; "
                "export again."
            )
    for name in _INPUTS[decoder.kv_form]:
        if name not in inputs:
            raise ManifestError(
                f"the graph has no {name}, but the manifest states a cache of the form {decoder.kv_form}; export again."
            )
    for state in decoder.states:
        for name, there in ((state.past, inputs), (state.present, outputs)):
            if name not in there:
                raise ManifestError(
                    f"the graph has no {name}, but the manifest lists it as a state of layer {state.layer}; export "
                    "again."
                )


def check_layout(decoder: DecoderInfo, specs: Iterable[TensorSpec]) -> None:
    """Raises ManifestError if cache tensors in `specs` do not match `decoder`."""
    by_name = {spec.name: spec for spec in specs}
    for state in decoder.states:
        for name in (state.past, state.present):
            spec = by_name[name]
            # symbolic dimensions are names
            sizes = zip(spec.shape[1:], state.shape, strict=False)
            fits = len(spec.shape) == len(state.shape) + 1 and all(
                isinstance(size, str) or wanted in (0, size) for size, wanted in sizes
            )
            if not fits or spec.dtype != state.dtype:
                raise ManifestError(
                    f"{name} is {spec.dtype} {list(spec.shape)}, but the manifest states {state.dtype} with rows of "
                    f"{list(state.shape)} (0: tokens); export again."
                )

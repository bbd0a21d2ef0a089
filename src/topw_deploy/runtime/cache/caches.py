"""The caches of a model's generations: which form a decoder needs, and whether its graph has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import KV_FORMS, DecoderInfo, TensorSpec
from topw_deploy.runtime.cache.buffers import CACHE_TYPES, MemoryPool, tensors
from topw_deploy.runtime.cache.concat import ConcatCache
from topw_deploy.runtime.cache.in_place import InPlaceCache, SharedCache, StaticCache
from topw_deploy.runtime.ort.host_binding import HostBinding
from topw_deploy.runtime.protocols import Binding, Session

DEFAULT_CHUNK = 1024  # tokens in one run: longer ones take more memory and are no faster
_INPUTS = {
    "concat": ("input_ids",),
    "static": ("input_ids", "write_indices", "row_lengths"),
    "shared": ("input_ids", "attention_mask"),
}


class Cache(Protocol):
    """The cache of one generation: `feed_prompts`, run, `begin_decoding`; then `advance` and run for each step.

    input_ids: int64 [B, 1], what the next step feeds; write it before `advance`.
    """

    input_ids: np.ndarray

    def feed_prompts(self) -> None:
        """Run all chunks of the prompts but the last, and bind that one."""

    def begin_decoding(self) -> None:
        """Bind the inputs of a step, one token per row."""

    def advance(self, rows: Iterable[int]) -> None:
        """Make room for one more token in `rows`; ended rows overwrite their last token."""


class Caches:
    """The caches of all generations of a session.

    max_length, max_batch: see `MemoryPool`. prefill_chunk: most tokens of all rows in one run.
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
        self._pool: MemoryPool | None = None
        if decoder.kv_form != "concat":
            self._pool = MemoryPool(session, decoder, max_length, max_batch)

    @property
    def bytes(self) -> int:
        """Of the allocated buffers; 0 for concat, whose caches belong to onnxruntime."""
        return 0 if self._pool is None else self._pool.bytes

    def open(self, binding: Binding, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> Cache:
        """A cache with one row per prompt and room for `budgets` more tokens. Close it."""
        if self._pool is None:
            assert isinstance(binding, HostBinding), "only onnxruntime's sessions have caches of the form concat"
            return ConcatCache(self._session, binding, self._decoder, prompts, max(budgets), self._chunk)
        form = StaticCache if self._decoder.kv_form == "static" else SharedCache
        return form(self._session, binding, self._decoder, self._pool, prompts, budgets, self._chunk)

    def close(self, cache: Cache) -> None:
        if isinstance(cache, InPlaceCache):
            cache.close()


def takes_ragged_batches(decoder: DecoderInfo) -> bool:
    """Whether prompts of different lengths may share a batch."""
    takes = {"static": True, "concat": decoder.left_padding, "shared": decoder.right_padding}
    return takes[decoder.kv_form]


def check_supported(decoder: DecoderInfo, inputs: frozenset[str], outputs: tuple[str, ...]) -> None:
    """Raises ManifestError for an unsupported cache, or a graph that lacks its tensors."""
    if decoder.kv_form not in _INPUTS:
        raise ManifestError(
            f"the cache has the form {decoder.kv_form!r}, this topw_deploy drives {', '.join(KV_FORMS)}; "
            "install a newer one."
        )
    if decoder.kv_dtype not in CACHE_TYPES:
        raise ManifestError(
            f"the cache has the element type {decoder.kv_dtype!r}, which is not one of {', '.join(CACHE_TYPES)}."
        )
    for name in _INPUTS[decoder.kv_form]:
        if name not in inputs:
            raise ManifestError(
                f"the graph has no {name}, but the manifest states a cache of the form {decoder.kv_form}; export again."
            )
    for past, present, _, _ in tensors(decoder):
        for name, there in ((past, inputs), (present, outputs)):
            if name not in there:
                raise ManifestError(
                    f"the graph has no {name}, but the manifest states {decoder.num_layers} layers; export again."
                )


def check_layout(decoder: DecoderInfo, specs: Iterable[TensorSpec]) -> None:
    """Raises ManifestError if cache tensors among `specs` do not fit `decoder`."""
    by_name = {spec.name: spec for spec in specs}
    for past, present, heads, dim in tensors(decoder):
        for name in (past, present):
            spec = by_name[name]
            stated = zip(spec.shape[1::2], (heads, dim), strict=False)  # a name where the graph leaves the size open
            fits = len(spec.shape) == 4 and all(isinstance(size, str) or size == wanted for size, wanted in stated)
            if not fits or spec.dtype != decoder.kv_dtype:
                raise ManifestError(
                    f"{name} is {spec.dtype} {list(spec.shape)}, but the manifest states a cache of "
                    f"{decoder.kv_dtype} with {heads} heads of {dim}; export again."
                )

"""Key-value caches, one class per form of docs/contract/graph.md section 8.

concat: each step takes the states as inputs and returns longer ones.
static, shared: the graph updates one buffer in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import KV_FORMS, DecoderInfo, TensorSpec
from topw_deploy.runtime.cache.buffers import CACHE_TYPES, MemoryPool
from topw_deploy.runtime.cache.concat import ConcatCache
from topw_deploy.runtime.cache.in_place import InPlaceCache, SharedCache, StaticCache
from topw_deploy.runtime.session import Binding, Session

DEFAULT_CHUNK = 1024  # tokens per run; more is no faster
_REQUIRED_INPUTS = {
    "concat": ("input_ids",),
    "static": ("input_ids", "write_indices", "row_lengths"),
    "shared": ("input_ids", "attention_mask"),
}

Cache: TypeAlias = InPlaceCache | ConcatCache
"""One generation's cache. Call `feed_prompts`, run, `begin_decoding`; then for each step `advance` and run.

input_ids: int64 [B, 1], the next tokens; write them before `advance`.
"""


class Caches:
    """Opens the caches of a session's generations, of the decoder's form.

    max_length, max_batch: `length` and `rows` of `MemoryPool`.
    prefill_chunk: maximum prompt tokens per run, over all rows.
    takes_ragged_batches: whether the prompts of a batch may differ in length.
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
        self._session, self._decoder, self._chunk = session, decoder, prefill_chunk or DEFAULT_CHUNK
        self._pool = None if decoder.kv_form == "concat" else MemoryPool(session, decoder, max_length, max_batch)
        pads = {"concat": decoder.left_padding, "static": True, "shared": decoder.right_padding}
        self.takes_ragged_batches = pads[decoder.kv_form]

    @property
    def bytes(self) -> int:
        """Size of the buffers; 0 for the form concat, whose states onnxruntime owns."""
        return 0 if self._pool is None else self._pool.bytes

    def open(self, binding: Binding, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> Cache:
        """Open a cache with a row per prompt and room for `budgets[row]` more tokens. The caller must close it."""
        if self._pool is None:
            return ConcatCache(self._session, binding, self._decoder, prompts, max(budgets), self._chunk)
        form = StaticCache if self._decoder.kv_form == "static" else SharedCache
        return form(self._session, binding, self._decoder, self._pool, prompts, budgets, self._chunk)


def check_cache(decoder: DecoderInfo, specs: Iterable[TensorSpec]) -> None:
    """Raises ManifestError for an unsupported cache, or if its tensors are missing in `specs` or differ there.

    specs: the inputs and outputs in the manifest, which are the graph's.
    """
    if decoder.kv_form not in _REQUIRED_INPUTS:
        raise ManifestError(
            f"the cache has the form {decoder.kv_form!r}, but this topw_deploy supports {', '.join(KV_FORMS)}; "
            "install a newer one."
        )
    by_name = {spec.name: spec for spec in specs}
    tensors = [(name, state) for state in decoder.states for name in (state.past, state.present)]
    for name in (*_REQUIRED_INPUTS[decoder.kv_form], *(name for name, _ in tensors)):
        if name not in by_name:
            raise ManifestError(
                f"the graph has no {name}, but its cache has the form {decoder.kv_form} and needs it; export again."
            )
    for name, state in tensors:
        spec = by_name[name]
        sizes = zip(spec.shape[1:], state.shape, strict=False)
        # A symbolic dimension is a name. Its size is not known here.
        fits = len(spec.shape) == len(state.shape) + 1 and all(
            isinstance(size, str) or wanted in (0, size) for size, wanted in sizes
        )
        if not fits or spec.dtype != state.dtype or state.dtype not in CACHE_TYPES:
            raise ManifestError(
                f"{name} is {spec.dtype} {list(spec.shape)}, but the manifest states {state.dtype} with rows of "
                f"{list(state.shape)} (0: tokens); a cache may be {', '.join(CACHE_TYPES)}; export again."
            )

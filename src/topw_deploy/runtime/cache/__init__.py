"""Key-value caches, one class per layout (`kv_form`) of docs/contract/graph.md section 8.

concat: each step takes the states as inputs and returns longer ones.
static, shared: the graph updates one buffer in place.
"""

from __future__ import annotations

from collections.abc import Iterable

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import KV_FORMS, DecoderInfo, TensorSpec
from topw_deploy.runtime.cache.buffers import CACHE_TYPES
from topw_deploy.runtime.cache.in_place import Cache as Cache
from topw_deploy.runtime.cache.in_place import Caches as Caches

_REQUIRED_INPUTS = {
    "concat": ("input_ids",),
    "static": ("input_ids", "write_indices", "row_lengths"),
    "shared": ("input_ids", "attention_mask"),
}


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

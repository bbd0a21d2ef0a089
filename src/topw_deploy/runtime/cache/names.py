"""The names that each form of cache goes by in a graph, and whether a graph has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import KV_FORMS, DecoderInfo, TensorSpec
from topw_deploy.runtime.session import ELEMENT_TYPES

_INPUTS = {
    "concat": ("input_ids",),
    "static": ("input_ids", "write_indices", "row_lengths"),
    "shared": ("input_ids", "attention_mask"),
}


def tensors(decoder: DecoderInfo) -> Iterator[tuple[str, str, int, int]]:
    """(past's name, present's name, kv_heads, head_dim) of every layer's keys and values."""
    for layer in range(decoder.num_layers):
        for part in ("key", "value"):
            sizes = decoder.num_kv_heads[layer], decoder.head_dim[layer]
            yield f"past_key_values.{layer}.{part}", f"present.{layer}.{part}", *sizes


def check_supported(decoder: DecoderInfo, inputs: frozenset[str], outputs: tuple[str, ...]) -> None:
    """ManifestError if this runtime cannot drive the decoder's cache."""
    if decoder.kv_form not in _INPUTS:
        raise ManifestError(
            f"the cache has the form {decoder.kv_form!r}, this topw_deploy drives {', '.join(KV_FORMS)}; "
            "install a newer one."
        )
    if decoder.kv_dtype not in ELEMENT_TYPES:
        raise ManifestError(
            f"the cache has the element type {decoder.kv_dtype!r}, which is not one of {', '.join(ELEMENT_TYPES)}."
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
    """ManifestError if the cache's tensors among `specs` are not of the decoder's element type, heads and sizes."""
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

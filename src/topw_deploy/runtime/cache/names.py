"""The names that each form of cache goes by in a graph, and whether a graph has them."""

from __future__ import annotations

from collections.abc import Iterator

from topw_deploy.errors import ManifestError
from topw_deploy.manifest import KV_FORMS, DecoderInfo
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

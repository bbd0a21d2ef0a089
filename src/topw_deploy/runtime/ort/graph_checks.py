"""Refuse graphs that this onnxruntime does not support, or would compute wrongly without an error.

On CUDA, `GatherBlockQuantized` over a uint8 table reads wrong weights:

- before 1.29 without zero points: it uses 0 where the CPU uses 2 ** (bits - 1);
- up to at least 1.31 if a row ends within a block: it uses scales of other rows.

This exporter avoids both; others may not.
"""

from __future__ import annotations

import os

import onnxruntime as ort

from topw_deploy.errors import ManifestError
from topw_deploy.folders import map_stream
from topw_deploy.install import major_minor
from topw_deploy.manifest import MODEL_NAME, DecoderManifest, Lookup, Manifest, ModelFolder
from topw_deploy.runtime.ort import providers

_COMPILED_OPERATOR = b"EPContext"
_FIRST_WITH_MIDDLE = (1, 29)  # the first version that takes 2 ** (bits - 1) for zero points that are not given


def refuse_compiled(folder: ModelFolder[Manifest]) -> None:
    """Raises ManifestError for EPContext nodes, through which a provider loads compiled code from the folder.

    The CPU's provider has no such operator.
    """
    with folder.open(MODEL_NAME) as stream:
        if not os.fstat(stream.fileno()).st_size:
            return  # cannot be mapped; onnxruntime refuses it
        with map_stream(stream) as graph:
            found = graph.find(_COMPILED_OPERATOR) >= 0
    if found:
        raise ManifestError(
            f"{folder.model} has an {_COMPILED_OPERATOR.decode()} node, which runs code compiled elsewhere; do not use "
            "this folder, or use provider='cpu'.",
            "provider",
        )


def check_version(folder: ModelFolder[Manifest]) -> None:
    """Raises ManifestError if the graph needs a newer onnxruntime."""
    manifest = folder.manifest
    if not isinstance(manifest, DecoderManifest):
        return
    least = manifest.decoder.least_onnxruntime
    if not least or major_minor(ort.__version__) >= major_minor(least):
        return
    other = ", or export with --no-window-cache" if manifest.decoder.evicts else ""
    raise ManifestError(
        f"{folder.path} needs the operators of onnxruntime {least}, and this is {ort.__version__}; install onnxruntime "
        f"{least} or newer{other}."
    )


def check_lookups(folder: ModelFolder[Manifest], provider: str) -> None:
    """Raises ManifestError for a lookup that `provider`, a full name, computes wrongly."""
    if providers.device_of(provider) != "cuda":
        return
    for lookup in folder.manifest.lookups:
        if found := lookup_error_clause(lookup, ort.__version__):
            raise ManifestError(f"{folder.path} looks embeddings up in {found}, or use provider='cpu'.", "provider")


def lookup_error_clause(lookup: Lookup, version: str) -> str:
    """A clause that says what onnxruntime `version` computes wrongly on CUDA, with a remedy; "" for nothing."""
    wrongly = f"which onnxruntime {version} reads wrongly on CUDA"
    again = "export the original model again"
    if not lookup.has_zero_points and major_minor(version) < _FIRST_WITH_MIDDLE:
        return f"a quantised table without zero points, {wrongly}; {again}, install 1.29 or newer"
    if lookup.width % lookup.block_size:
        size = f"rows of {lookup.width} weights in blocks of {lookup.block_size}"
        return f"{size}, {wrongly}; {again}"
    return ""

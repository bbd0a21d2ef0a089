"""Checks whether browsers can run an export, and warns of what is slow there."""

from __future__ import annotations

from pathlib import Path

from topw_deploy.errors import ManifestError, UnsupportedModelError
from topw_deploy.folders import map_file
from topw_deploy.install import major_minor
from topw_deploy.manifest import MODEL_NAME, DecoderManifest
from topw_deploy.text import decimal_size
from topw_deploy.web.libraries import ONNXRUNTIME_VERSION

MOST_BYTES = 2_000_000_000
"""Maximum bytes of a graph with its weights. WebAssembly has 4 GiB for weights, their packed copies, and the cache."""

_STATE_TYPES = ("float", "float16", "uint8", "int8", "int32", "int64", "bool")  # the JavaScript library can hold these
_EIGHT_BITS = 4  # the accuracy_level of MatMulNBits that rounds activations


def graph_bytes(manifest: DecoderManifest, folder: Path) -> int:
    """Bytes of the graph and its weights, which may be in several files."""
    with map_file(folder / MODEL_NAME) as graph:
        return sum(
            entry.size
            for name, entry in manifest.files.items()
            if name == MODEL_NAME or graph.find(_location_entry(name)) >= 0
        )


def _location_entry(name: str) -> bytes:
    """The ONNX StringStringEntryProto by which a tensor states that its data is in the file `name`."""
    text = name.encode()
    size = bytes([len(text)]) if len(text) < 128 else bytes([len(text) & 127 | 128, len(text) >> 7])
    return b"\n\x08location\x12" + size + text


def check_runs(manifest: DecoderManifest, folder: Path) -> None:
    """Raises UnsupportedModelError for an export that browsers cannot run, ManifestError for an unfinished one."""
    if manifest.verification.status == "provisional":
        raise ManifestError(f"{folder} is an export whose verification did not finish; export the model again.")
    half = manifest.decoder.weights.get(
        "float16", 0
    )  # bytes; onnxruntime converts them to float32 when it opens the graph
    size = graph_bytes(manifest, folder) + half
    if size > MOST_BYTES:
        raise UnsupportedModelError(
            f"{folder} has {decimal_size(size)} of weights{', as float32' if half else ''}, but a browser can hold at "
            f"most {decimal_size(MOST_BYTES)}; export with --dtype int8 or int4, or a smaller model."
        )
    if "tokenizer.json" not in manifest.files:
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json, which the page needs; export the model again from a folder with a "
            "tokenizer."
        )
    for state in manifest.decoder.states:
        if state.dtype not in _STATE_TYPES:
            raise UnsupportedModelError(
                f"{folder} has a cache of the element type {state.dtype}, which JavaScript lacks; export with --dtype "
                "fp32 or fp16."
            )
    least = manifest.decoder.least_onnxruntime
    if least and major_minor(least) > major_minor(ONNXRUNTIME_VERSION):
        raise UnsupportedModelError(
            f"{folder} needs onnxruntime {least}, but the page has onnxruntime-web {ONNXRUNTIME_VERSION}; export "
            "without what needs the newer one, such as with --no-window-cache."
        )
    if manifest.source.get("route") == "graft" and any(spec.name == "logits" for spec in manifest.outputs):
        raise UnsupportedModelError(
            f"{folder} is a graft with logits, whose sampler inputs have defaults, which onnxruntime for JavaScript "
            "cannot change; graft it again without --with-logits."
        )


def notes(manifest: DecoderManifest) -> list[str]:
    """Warnings about speed and tokens for the author of a site, one sentence each."""
    weights, quantisation = manifest.decoder.weights, manifest.decoder.quantisation
    packed = weights.get("uint8", 0) + weights.get("int8", 0)
    if not quantisation and packed <= sum(weights.values()) / 2:
        return []
    bits = quantisation.get("bits")
    what = "packed weights" if bits is None else f"{bits}-bit weights"
    found = [
        f"onnxruntime-web multiplies {what} 20 to 30 times slower than float32 ones; export with --dtype fp32 where "
        "speed matters more than the size of the download."
    ]
    if quantisation.get("accuracy_level", _EIGHT_BITS) == _EIGHT_BITS:
        found.append(
            "outside browsers onnxruntime may round the activations of these products to 8 bits, so the tokens differ "
            "from Python's; export with --accuracy-level 1 for equal ones."
        )
    return found

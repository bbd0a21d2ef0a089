"""Verification of a model's first layers, where memory does not suffice for all.

The verification holds the torch model in float32 and two or three sessions of the graph. If these do not fit, the first
layers are exported once more with the same options and weights, and verified in place of the whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from topw_deploy.export.build import Built
from topw_deploy.export.memory import available_bytes
from topw_deploy.export.request import ExportRequest
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.write.weights import parameter_count, tensors_of
from topw_deploy.manifest import Verification

LAYERS = 4
"""Layers verified in place of the whole."""
# Memory of the verification by the type of the weights: bytes of the libraries and their working memory, and bytes per
# parameter of the torch model in float32 and of the sessions with their weights in the kernels' layouts. Fitted to 52,
# 113 and 202 M parameters for float32 and to 52, 113 and 600 M for float16 and int4, each within 8.5 %; one measurement
# for int8.
_HELD = {
    "float": (1_220_000_000, 11.2),
    "float16": (1_150_000_000, 10.6),
    "bfloat16": (680_000_000, 6.0),
    "int4": (1_150_000_000, 5.8),
    "int8": (1_150_000_000, 7.8),
}


def verification_bytes(built: Built) -> int:
    """Estimated memory for verifying all of `built`."""
    fixed, held = _HELD.get(built.decoder.info.weights_dtype, _HELD["float"])
    return fixed + round(held * parameter_count(built.decoder.model))


def layers_to_verify(built: Built, source: Source) -> int | None:
    """LAYERS if memory does not suffice for all, else None. A decoder of another exporter is not cut."""
    free = available_bytes()
    few = source.onnx is None and built.decoder.info.num_layers > LAYERS
    return LAYERS if few and 0 < free < verification_bytes(built) else None


def bytes_beside(built: Built, source: Source, files: int) -> int:
    """Disk space of the first layers' export, beside an export of `files` bytes; 0 if all layers are verified."""
    if layers_to_verify(built, source) is None:
        return 0
    tables = 2 * max((int(tensor.nbytes) for tensor in tensors_of(built.decoder.model)), default=0)
    return min(files, files * LAYERS // built.decoder.info.num_layers + tables)


def verify_first_layers(
    request: ExportRequest,
    layers: int,
    folder: Path,
    export: Callable[[ExportRequest], object],
    verify: Callable[[ExportRequest], tuple[Verification, bool]],
) -> tuple[Verification, bool]:
    """Export the first `layers` into `folder` and verify that.

    Every check's detail names the layers, and the status is "partial", as the whole graph was not run.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
    fewer = replace(request, output=folder, num_hidden_layers=layers, verify=False, resume=False, overwrite=False)
    export(replace(fewer, neighbour_bound=False))
    verification, may_pad = verify(fewer)
    checks = tuple(replace(check, detail=f"{check.detail}; first {layers} layers") for check in verification.checks)
    return replace(verification, status="partial", checks=checks), may_pad

"""How deep an export can be verified here: of a model that memory cannot hold several times, the first layers are.

The verification runs the torch model in float32 beside two or three sessions of the graph. Where that does not fit, the
first layers are exported once more, by the same steps, options and weights, and verified in place of the whole.
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
"""How many layers stand for the whole."""
# What the verification holds, by the type of the weights: bytes of its libraries and their working memory, and bytes
# per parameter of the torch model in float32 and the sessions with their copies in the layout of their kernels. Fitted
# to 52, 113 and 202 M parameters for float32, to 52, 113 and 600 M for float16 and int4, all of them within 8.5 %; int8
# lies between, by one measurement.
_HELD = {
    "float": (1_220_000_000, 11.2),
    "float16": (1_150_000_000, 10.6),
    "bfloat16": (680_000_000, 6.0),
    "int4": (1_150_000_000, 5.8),
    "int8": (1_150_000_000, 7.8),
}


def verification_bytes(built: Built) -> int:
    """About how much memory verifying all of `built` takes."""
    fixed, held = _HELD.get(built.decoder.info.weights_dtype, _HELD["float"])
    return fixed + round(held * parameter_count(built.decoder.model))


def layers_to_verify(built: Built, source: Source) -> int | None:
    """None for all; a number where the machine has not the memory for more. A decoder that exists is not cut."""
    free = available_bytes()
    few = source.onnx is None and built.decoder.info.num_layers > LAYERS
    return LAYERS if few and 0 < free < verification_bytes(built) else None


def bytes_beside(built: Built, source: Source, files: int) -> int:
    """Bytes on the disk that the verification takes beside an export of `files` bytes: those of its first layers."""
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
    """Export the first `layers` into `folder` and verify that; its checks say how deep they went.

    The status is "partial" at best: the whole graph was not run.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
    fewer = replace(request, output=folder, num_hidden_layers=layers, verify=False, resume=False, overwrite=False)
    export(replace(fewer, neighbour_bound=False))
    verification, may_pad = verify(fewer)
    checks = tuple(replace(check, detail=f"{check.detail}; first {layers} layers") for check in verification.checks)
    return replace(verification, status="partial", checks=checks), may_pad

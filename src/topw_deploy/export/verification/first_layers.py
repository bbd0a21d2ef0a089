"""Verify only the first layers if memory is short.

Verification holds the float32 torch model and two or three graph sessions. If these do not fit, the first layers are
exported again, with equal options and weights, and verified instead.
"""

from __future__ import annotations

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.job import Job
from topw_deploy.export.write.weights import parameter_count, tensors_of
from topw_deploy.memory import available_bytes

LAYERS = 4
"""Layers verified in place of the whole."""
# Memory by weight type: fixed bytes for libraries, and bytes per parameter for torch model and sessions. Fitted to 52,
# 113 and 202 M parameters for float32 and to 52, 113 and 600 M for float16 and int4, within 8.5 %; one measurement for
# int8.
_HELD = {
    "float": (1_220_000_000, 11.2),
    "float16": (1_150_000_000, 10.6),
    "bfloat16": (680_000_000, 6.0),
    "int4": (1_150_000_000, 5.8),
    "int8": (1_150_000_000, 7.8),
}


def verification_bytes(decoder: Decoder) -> int:
    """Estimated memory for full verification."""
    fixed, held = _HELD.get(decoder.info.weights_dtype, _HELD["float"])
    return fixed + round(held * parameter_count(decoder.model))


def layers_to_verify(job: Job, decoder: Decoder) -> int | None:
    """LAYERS if memory is short, else None. Never cuts another exporter's decoder."""
    free = available_bytes()
    few = job.source.onnx is None and decoder.info.num_layers > LAYERS
    return LAYERS if few and 0 < free < verification_bytes(decoder) else None


def bytes_beside(job: Job, decoder: Decoder, files: int) -> int:
    """Disk space for exporting the first layers of a `files`-byte export."""
    if layers_to_verify(job, decoder) is None:
        return 0
    tables = 2 * max((int(tensor.nbytes) for tensor in tensors_of(decoder.model)), default=0)
    return min(files, files * LAYERS // decoder.info.num_layers + tables)

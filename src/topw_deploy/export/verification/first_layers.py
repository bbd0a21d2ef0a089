"""Verification of a model's first layers, where memory does not suffice for all.

The verification holds the torch model in float32 and two or three sessions of the graph. If these do not fit, the first
layers are exported once more with the same options and weights, and verified in place of the whole.
"""

from __future__ import annotations

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.job import Job
from topw_deploy.export.write.weights import parameter_count, tensors_of
from topw_deploy.memory import available_bytes

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


def verification_bytes(decoder: Decoder) -> int:
    """Estimated memory for verifying all of `decoder`."""
    fixed, held = _HELD.get(decoder.info.weights_dtype, _HELD["float"])
    return fixed + round(held * parameter_count(decoder.model))


def layers_to_verify(job: Job, decoder: Decoder) -> int | None:
    """LAYERS if memory does not suffice for all, else None. A decoder of another exporter is not cut."""
    free = available_bytes()
    few = job.source.onnx is None and decoder.info.num_layers > LAYERS
    return LAYERS if few and 0 < free < verification_bytes(decoder) else None


def bytes_beside(job: Job, decoder: Decoder, files: int) -> int:
    """Disk space of the first layers' export, beside an export of `files` bytes."""
    if layers_to_verify(job, decoder) is None:
        return 0
    tables = 2 * max((int(tensor.nbytes) for tensor in tensors_of(decoder.model)), default=0)
    return min(files, files * LAYERS // decoder.info.num_layers + tables)

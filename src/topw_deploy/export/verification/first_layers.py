"""How deep an export can be verified here: of a model that memory cannot hold several times, the first layers are.

The verification runs the torch model in float32 beside two or three sessions of the graph. Where that does not fit, the
first layers are exported once more, by the same steps, options and weights, and verified in place of the whole.
"""

from __future__ import annotations

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.job import Job
from topw_deploy.export.write.weights import parameter_count, tensors_of
from topw_deploy.memory import available_bytes

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


def verification_bytes(decoder: Decoder) -> int:
    """About how much memory verifying all of `decoder` takes."""
    fixed, held = _HELD.get(decoder.info.weights_dtype, _HELD["float"])
    return fixed + round(held * parameter_count(decoder.model))


def layers_to_verify(job: Job, decoder: Decoder) -> int | None:
    """None for all; a number where the machine has not the memory for more. A decoder that exists is not cut."""
    free = available_bytes()
    few = job.source.onnx is None and decoder.info.num_layers > LAYERS
    return LAYERS if few and 0 < free < verification_bytes(decoder) else None


def bytes_beside(job: Job, decoder: Decoder, files: int) -> int:
    """Bytes on the disk that the verification takes beside an export of `files` bytes: those of its first layers."""
    if layers_to_verify(job, decoder) is None:
        return 0
    tables = 2 * max((int(tensor.nbytes) for tensor in tensors_of(decoder.model)), default=0)
    return min(files, files * LAYERS // decoder.info.num_layers + tables)

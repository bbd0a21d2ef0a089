"""Estimate disk space and memory of an export, without reading weights.

Verification holds the float32 torch model and two or three graph sessions. If these do not fit, the first layers are
exported again, with equal options and weights, and verified instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.graph.editor import external_files, initializer_tensors
from topw_deploy.export.graph.lazy_weight import PART, LazyWeight
from topw_deploy.export.job import Job
from topw_deploy.export.write.data_files import Slot
from topw_deploy.export.write.staging import linkable
from topw_deploy.export.write.tokenizer_files import COPIED
from topw_deploy.export.write.weights import data_slots, parameter_count, quantised_type, written_sizes
from topw_deploy.manifest import MODEL_NAME
from topw_deploy.memory import available_bytes, resident_bytes

_MANIFEST = 16 << 10  # manifest and configuration, approximate bytes
_QUANTISING = {"int4": 12.0, "int8": 6.5}  # peak memory per byte of codes (measured for int4)
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


@dataclass(frozen=True)
class Plan:
    """Resources for writing a graph.

    files: name -> bytes; some small files are left out.
    shared: bytes in hard links, which need no space.
    beside: bytes of temporary files for verification.
    slots: locations of the weights.
    memory: stage -> estimated peak resident bytes.
    """

    files: dict[str, int]
    shared: int
    beside: int
    slots: list[Slot]
    memory: dict[str, int]

    @property
    def needed(self) -> int:
        """Free disk space required, in bytes."""
        return sum(self.files.values()) - self.shared + self.beside + _MANIFEST

    @property
    def data(self) -> int:
        """Bytes of data files."""
        return sum(size for name, size in self.files.items() if name not in (MODEL_NAME, *COPIED))


def plan_of(job: Job, decoder: Decoder, folder: Path) -> Plan:
    """Plan the files of `folder`, which need not exist."""
    slots = data_slots(decoder.model, job.request.weights.shard_bytes)
    files = written_sizes(decoder.model, slots)
    shared = 0
    for location, path in onnx_data_files(job, decoder).items():
        files[location] = path.resolve().stat().st_size
        if job.request.weights.hard_link and linkable(path, _existing(folder)):
            shared += files[location]
    for name in COPIED:
        if (job.tokenizer_folder / name).is_file():
            files[name] = (job.tokenizer_folder / name).stat().st_size
    memory = {"writing": resident_bytes() + max((_in_memory(slot) for slot in slots), default=files[MODEL_NAME])}
    beside = 0
    if job.request.verify:
        memory["verification"] = verification_bytes(decoder)
        beside = bytes_beside(job, decoder, sum(files.values()))
    return Plan(files, shared, beside, slots, memory)


def onnx_data_files(job: Job, decoder: Decoder) -> dict[str, Path]:
    """Location in the graph -> path, for an ONNX decoder."""
    if job.source.onnx is None:
        return {}
    return {location: job.source.onnx.parent / location for location in external_files(decoder.model)}


def _in_memory(slot: Slot) -> int:
    tensor, nbytes = slot.tensor, slot.length
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        return nbytes + 2 * min(nbytes, PART)
    if not isinstance(tensor, ir.LazyTensor):
        return nbytes
    return round(_QUANTISING.get(quantised_type(slot.value) or "", 3) * nbytes)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


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
    tables = 2 * max((int(tensor.nbytes) for tensor in initializer_tensors(decoder.model)), default=0)
    return min(files, files * LAYERS // decoder.info.num_layers + tables)

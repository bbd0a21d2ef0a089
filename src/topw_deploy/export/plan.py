"""Estimate disk space and memory of an export, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.graph.lazy_weight import PART, LazyWeight
from topw_deploy.export.job import Job
from topw_deploy.export.verification.first_layers import bytes_beside, verification_bytes
from topw_deploy.export.write.data_files import Slot
from topw_deploy.export.write.staging import linkable
from topw_deploy.export.write.tokenizer_files import COPIED
from topw_deploy.export.write.weights import MODEL_FILE, data_slots, external_files, quantised_type, written_sizes
from topw_deploy.memory import resident_bytes

_MANIFEST = 16 << 10  # manifest and configuration, approximate bytes
_QUANTISING = {"int4": 12.0, "int8": 6.5}  # peak memory per byte of codes (measured for int4)


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
        return sum(size for name, size in self.files.items() if name not in (MODEL_FILE, *COPIED))


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
    memory = {"writing": resident_bytes() + max((_in_memory(slot) for slot in slots), default=files[MODEL_FILE])}
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

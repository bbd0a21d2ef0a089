"""What an export will take, from the finished graph and without its weights: bytes on the disk, bytes of memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from topw_deploy.export.build import Built
from topw_deploy.export.graph.lazy_weight import PART, LazyWeight
from topw_deploy.export.memory import resident_bytes
from topw_deploy.export.request import ExportRequest
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.verification.first_layers import bytes_beside, verification_bytes
from topw_deploy.export.write.data_files import Slot
from topw_deploy.export.write.staging import linkable
from topw_deploy.export.write.tokenizer_files import COPIED
from topw_deploy.export.write.weights import MODEL_FILE, data_slots, external_files, quantised_type, written_sizes

_MANIFEST = 16 << 10  # bytes of the manifest and the configuration files, about
_QUANTISING = {"int4": 12.0, "int8": 6.5}  # bytes of quantising a weight per byte of its codes (measured for int4)


@dataclass(frozen=True)
class Plan:
    """files: name -> bytes of all that OUT will hold, but for a few small ones. shared: bytes of them that need no
    space, being hard links. beside: bytes that the verification needs for a while. slots: where the weights that are
    written here will lie.
    memory: stage -> most bytes resident."""

    files: dict[str, int]
    shared: int
    beside: int
    slots: list[Slot]
    memory: dict[str, int]

    @property
    def needed(self) -> int:
        """Bytes that the disk must have free before the first one is written."""
        return sum(self.files.values()) - self.shared + self.beside + _MANIFEST

    @property
    def data(self) -> int:
        """Bytes of data files that are copied or written, as a bar counts them."""
        return sum(size for name, size in self.files.items() if name not in (MODEL_FILE, *COPIED))


def plan_of(built: Built, source: Source, tokenizer_folder: Path, folder: Path, request: ExportRequest) -> Plan:
    """The plan of writing `built` into `folder` (which need not exist yet)."""
    model = built.decoder.model
    slots = data_slots(model, request.shard_bytes)
    files = written_sizes(model, slots)
    shared = 0
    for location, path in brought_files(built, source).items():
        files[location] = path.resolve().stat().st_size
        if request.hard_link and linkable(path, _existing(folder)):
            shared += files[location]
    for name in COPIED:
        if (tokenizer_folder / name).is_file():
            files[name] = (tokenizer_folder / name).stat().st_size
    writing = resident_bytes() + max((_in_memory(slot) for slot in slots), default=files[MODEL_FILE])
    memory = {"writing": writing}
    if request.verify:
        memory["verification"] = verification_bytes(built)
    beside = bytes_beside(built, source, sum(files.values())) if request.verify else 0
    return Plan(files, shared, beside, slots, memory)


def brought_files(built: Built, source: Source) -> dict[str, Path]:
    """Data files of an ONNX decoder that come along: as its graph names them -> where they are."""
    if source.onnx is None:
        return {}
    return {location: source.onnx.parent / location for location in external_files(built.decoder.model)}


def _in_memory(slot: Slot) -> int:
    """Most bytes that writing a weight holds at a time: what it reads, that converted, and the part on its way out."""
    tensor, nbytes = slot.tensor, slot.length
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        return nbytes + 2 * min(nbytes, PART)
    if not isinstance(tensor, ir.LazyTensor):
        return nbytes
    return round(_QUANTISING.get(quantised_type(slot.value) or "", 3) * nbytes)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())

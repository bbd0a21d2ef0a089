"""Estimate the disk space and the memory of an export, without reading weights.

A verification holds the float32 torch model and two or three graph sessions in memory. If these do not fit, the first
layers are exported again, with the same options and weights, and verified instead of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from topw_deploy.export.decoder import Decoder
from topw_deploy.export.graph import BLOCK_BYTES, LazyWeight, initializer_tensors
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.source.tokenizer import COPIED_FILES
from topw_deploy.export.write.weights import (
    Slot,
    data_slots,
    onnx_data_files,
    parameter_count,
    quantised_type,
    written_sizes,
)
from topw_deploy.manifest import MODEL_NAME
from topw_deploy.progress import available_bytes, resident_bytes

_SMALL_FILES = 16 << 10  # approximate bytes of the manifest and the configuration
_QUANTISATION_PEAK = {"int4": 12.0, "int8": 6.5}  # bytes of memory per byte of codes (measured for int4)
VERIFIED_LAYERS = 4
"""Number of first layers that are verified if memory is short."""
# Memory of a verification by type of weights: a constant number of bytes for libraries, and bytes per parameter for the
# torch model and the sessions. Fitted to 52, 113 and 202 M parameters for float32 and to 52, 113 and 600 M for float16
# and int4, within 8.5 %; to one measurement for int8.
_VERIFICATION_MEMORY = {
    "float": (1_220_000_000, 11.2),
    "float16": (1_150_000_000, 10.6),
    "bfloat16": (680_000_000, 6.0),
    "int4": (1_150_000_000, 5.8),
    "int8": (1_150_000_000, 7.8),
}


@dataclass(frozen=True)
class Plan:
    """The resources that writing and verifying an export takes.

    files: name -> bytes, without some small files.
    linked_bytes: bytes in hard links, which need no disk space.
    temporary_bytes: bytes of temporary files for the verification.
    slots: places of the weights in the data files.
    memory: stage -> estimated peak resident bytes.
    """

    files: dict[str, int]
    linked_bytes: int
    temporary_bytes: int
    slots: list[Slot]
    memory: dict[str, int]

    @property
    def needed_bytes(self) -> int:
        """The free disk space that the export needs."""
        return sum(self.files.values()) - self.linked_bytes + self.temporary_bytes + _SMALL_FILES

    @property
    def data_bytes(self) -> int:
        """The size of all data files together."""
        return sum(size for name, size in self.files.items() if name not in (MODEL_NAME, *COPIED_FILES))


def plan_of(decoder: Decoder, source: Source, options: ExportOptions, folder: Path) -> Plan:
    """The plan for writing `decoder` to `folder`, which need not exist."""
    slots = data_slots(decoder.model, options.shard_bytes)
    files = written_sizes(decoder.model, slots)
    linked_bytes = 0
    for location, path in onnx_data_files(decoder.model, source).items():
        files[location] = path.resolve().stat().st_size
        if options.hard_link and path.resolve().stat().st_dev == _first_existing(folder).stat().st_dev:
            linked_bytes += files[location]
    for name in COPIED_FILES:
        if (source.tokenizer / name).is_file():
            files[name] = (source.tokenizer / name).stat().st_size
    weight_peak = max((_peak_bytes(slot) for slot in slots), default=files[MODEL_NAME])
    memory = {"writing": resident_bytes() + weight_peak}
    temporary_bytes = 0
    if options.verify:
        memory["verification"] = verification_bytes(decoder)
        temporary_bytes = first_layers_bytes(decoder, source, sum(files.values()))
    return Plan(files, linked_bytes, temporary_bytes, slots, memory)


def _peak_bytes(slot: Slot) -> int:
    """Estimated memory for writing one weight."""
    tensor, nbytes = slot.tensor, slot.length
    if isinstance(tensor, LazyWeight) and tensor.read is not None:
        return nbytes + 2 * min(nbytes, BLOCK_BYTES)
    if not isinstance(tensor, ir.LazyTensor):
        return nbytes
    return round(_QUANTISATION_PEAK.get(quantised_type(slot.value) or "", 3) * nbytes)


def _first_existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def verification_bytes(decoder: Decoder) -> int:
    """Estimated memory for a verification of all layers."""
    fixed, per_parameter = _VERIFICATION_MEMORY.get(decoder.info.weights_dtype, _VERIFICATION_MEMORY["float"])
    return fixed + round(per_parameter * parameter_count(decoder.model))


def layers_to_verify(decoder: Decoder, source: Source) -> int | None:
    """VERIFIED_LAYERS if there is too little memory to verify all layers, else None.

    None also for another exporter's decoder, which cannot be cut, and where the free memory is unknown.
    """
    free = available_bytes()  # 0 if unknown
    can_cut = source.onnx is None and decoder.info.num_layers > VERIFIED_LAYERS
    return VERIFIED_LAYERS if can_cut and 0 < free < verification_bytes(decoder) else None


def first_layers_bytes(decoder: Decoder, source: Source, file_bytes: int) -> int:
    """Disk space for an export of the first layers, if these are verified in place of the whole; else 0.

    file_bytes: size of the whole export.
    """
    if layers_to_verify(decoder, source) is None:
        return 0
    tables = 2 * max((int(tensor.nbytes) for tensor in initializer_tensors(decoder.model)), default=0)
    return min(file_bytes, file_bytes * VERIFIED_LAYERS // decoder.info.num_layers + tables)

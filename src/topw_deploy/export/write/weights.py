"""Write a graph with its weights. Weights of a large model go into data files, each weight once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir

from topw_deploy.dtypes import ELEMENT_TYPES
from topw_deploy.export.graph import external_files, initializer_tensors
from topw_deploy.export.write.data_files import Log, NullLog, Slot, external_tensor, file_sizes, lay_out, write_data
from topw_deploy.manifest import MODEL_NAME

# Up to this many bytes, weights stay in model.onnx: one file is easier to copy and compare. Above, the runtime maps a
# data file instead of parsing a copy (59 instead of 89 MB for 35 MB of 4-bit weights), and tools can edit the graph
# without reading weights. Protobuf's limit is 2 GiB.
EXTERNAL_ABOVE = 16 << 20

_QUANTISED = {"MatMulNBits": "bits", "GatherBlockQuantized": "bits", "QMoE": "expert_weight_bits"}
_CODE_TYPES = (ir.DataType.UINT4, ir.DataType.INT4, ir.DataType.INT8)


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all initializers together."""
    return sum(tensor.nbytes for tensor in initializer_tensors(model))


def parameter_count(model: ir.Model) -> int:
    """Return the approximate number of weights, from the bytes of each element type."""
    sizes = bytes_by_type(model).items()
    return round(sum(size * 8 / ELEMENT_TYPES[name].bits for name, size in sizes if name in ELEMENT_TYPES))


def bytes_by_type(model: ir.Model) -> dict[str, int]:
    """Return {element type (see quantised_type): bytes of initializers}, the largest first."""
    found: dict[str, int] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                name = quantised_type(value) or value.const_value.dtype.name.lower()
                found[name] = found.get(name, 0) + int(value.const_value.nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def quantised_type(value: ir.Value) -> str | None:
    """`int4` or `int8` for codes and zero points of a block-quantised weight (stored as uint8), else None."""
    for node, _ in value.uses():
        if node.op_type in _QUANTISED and value.const_value is not None:
            name = _QUANTISED[node.op_type]
            bits = node.attributes[name].as_int() if name in node.attributes else 4
            return f"int{bits}" if value.const_value.dtype in (ir.DataType.UINT8, *_CODE_TYPES) else None
    return None


def data_slots(model: ir.Model, max_shard_size: int | None = None) -> list[Slot]:
    """Lay out the weights that no data file holds yet. Returns no slots if they fit into model.onnx."""
    unwritten = [
        value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None and not isinstance(value.const_value, ir.ExternalTensor)
    ]
    inline_bytes = EXTERNAL_ABOVE if max_shard_size is None else min(EXTERNAL_ABOVE, max_shard_size)
    if sum(value.const_value.nbytes for value in unwritten) <= inline_bytes:  # type: ignore[union-attr]
        return []
    return lay_out(unwritten, external_files(model), max_shard_size)


def written_sizes(model: ir.Model, slots: list[Slot]) -> dict[str, int]:
    """Return {file name: bytes} of the files that `write_model` would write."""
    with _refer_to_files(slots, Path()):
        return {MODEL_NAME: ir.to_proto(model).ByteSize(), **file_sizes(slots)}


def write_model(
    model: ir.Model,
    folder: Path,
    progress: Callable[[int], object] = lambda _bytes: None,
    slots: list[Slot] | None = None,
    log: Log | None = None,
) -> None:
    """Write model.onnx and the data files of `slots` into `folder`.

    References to the decoder's own data files keep their relative locations.
    progress: called with the number of bytes of each part.
    slots: by default those of data_slots.
    log: the log of written weights, see write_data.
    """
    slots = data_slots(model) if slots is None else slots
    write_data(slots, folder, log or NullLog(), progress)
    with _refer_to_files(slots, folder):
        ir.save(model, folder / MODEL_NAME)


@contextlib.contextmanager
def _refer_to_files(slots: list[Slot], folder: Path) -> Iterator[None]:
    """Inside the block, the graph refers to the data files instead of holding the weights of `slots`."""
    before = [slot.tensor for slot in slots]
    for slot in slots:
        slot.value.const_value = external_tensor(slot, folder)
    try:
        yield
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            slot.value.const_value = tensor

"""Find the sampler's embeddings and the quantised lookups of a written graph, for its manifest."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir

from topw_deploy.export.sampler.spec import OP_TYPE
from topw_deploy.folders import map_file
from topw_deploy.manifest import MODEL_NAME, EmbeddingTable, Lookup, StoredArray

_MEAN, _INVERSE_STD, _TABLE = 14, 15, 17  # inputs of the sampler node
_LOOKUP = "GatherBlockQuantized"


def read_tables(folder: Path) -> tuple[EmbeddingTable | None, tuple[Lookup, ...]]:
    """Read `folder/model.onnx`.

    Returns (the sampler's embeddings, or None if they are not plain or block-quantised constants; lookups in uint8).
    """
    graph = ir.load(folder / MODEL_NAME).graph
    lookups = (_read_lookup(node) for node in graph if node.op_type == _LOOKUP)
    sampler = next((node for node in graph if node.op_type == OP_TYPE), None)
    table = None if sampler is None or len(sampler.inputs) <= _TABLE else _read_table(sampler, folder)
    return table, tuple(lookup for lookup in lookups if lookup is not None)


def _read_table(sampler: ir.Node, folder: Path) -> EmbeddingTable | None:
    form = sampler.attributes["table_form"].as_string() if "table_form" in sampler.attributes else ""
    values = [*sampler.inputs[_MEAN : _INVERSE_STD + 1], *sampler.inputs[_TABLE:]]
    arrays = [None if value is None else _stored(value, folder) for value in values]
    mean, inverse_std, rows, *others = arrays
    if mean is None or inverse_std is None or rows is None:
        return None
    if form.startswith("Gather("):
        transposed = _producer(sampler.inputs[_TABLE]) == "Transpose"
        return EmbeddingTable(rows=rows, mean=mean, inverse_std=inverse_std, transposed=transposed)
    if rows.dtype != "uint8" or "quantize_axis=1" not in form:
        return None
    settings = dict(pair.split("=") for pair in form.partition("(")[2].rstrip(")").split(","))
    return EmbeddingTable(
        rows=rows,
        mean=mean,
        inverse_std=inverse_std,
        bits=8 if settings["bits"] == "8" else 4,
        block_size=int(settings["block_size"]),
        scales=others[0],
        zero_points=others[1] if len(others) > 1 else None,
    )


def _stored(value: ir.Value, folder: Path) -> StoredArray | None:
    """Find the place of a constant's bytes; None if it is none."""
    tensor = _constant(value)
    if tensor is None or tensor.dtype.name.lower() not in ("float", "float16", "bfloat16", "uint8"):
        return None
    shape = tuple(tensor.shape.numpy())
    if len(shape) > 2:  # a tied head's codes [V, blocks, bytes]
        shape = (shape[0], math.prod(shape[1:]))
    if isinstance(tensor, ir.ExternalTensor):
        return StoredArray(str(tensor.location), tensor.offset or 0, tensor.dtype.name.lower(), shape)
    offset = map_file(folder / MODEL_NAME).find(tensor.tobytes())
    return None if offset < 0 else StoredArray(MODEL_NAME, offset, tensor.dtype.name.lower(), shape)


def _constant(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the constant behind a value, also behind Reshape and Transpose."""
    producer = value.producer()
    if producer is not None and producer.op_type in ("Reshape", "Transpose") and producer.inputs[0] is not None:
        return _constant(producer.inputs[0])
    return value.const_value


def _producer(value: ir.Value | None) -> str:
    producer = None if value is None else value.producer()
    return "" if producer is None else producer.op_type


def _read_lookup(node: ir.Node) -> Lookup | None:
    table = None if node.inputs[0] is None else _constant(node.inputs[0])
    if table is None or table.dtype != ir.DataType.UINT8:
        return None
    bits = node.attributes["bits"].as_int() if "bits" in node.attributes else 4
    return Lookup(
        block_size=node.attributes["block_size"].as_int() if "block_size" in node.attributes else 128,
        width=math.prod(table.shape.numpy()[1:]) * 8 // bits,
        has_zero_points=len(node.inputs) > 3 and node.inputs[3] is not None,
    )

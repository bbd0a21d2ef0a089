"""The torch model with the weights that a quantised export holds: rounded by the same quantiser, and back in float32.

A block lies within one output of one weight, so it does not matter that the graph may hold several weights as one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from topw_deploy.export.graft.table import stored_array
from topw_deploy.export.quantise.blocks import BlocksShape, dequantise, quantise_weight
from topw_deploy.export.quantise.packed_rows import PackedRows
from topw_deploy.export.quantise.scheme import Quantisation
from topw_deploy.export.write.weights import MODEL_FILE

_FLOAT32 = np.dtype(np.float32)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_COMPARED = 64  # leading weights of an output that tell it from all others


def dequantise_model(
    model: PreTrainedModel, folder: Path, settings: Quantisation, packed: PackedRows | None = None
) -> None:
    """Round the matrices of `model` in place, but for those that the export in `folder` keeps in float, and those that
    are rounded already, `packed` in the checkpoint."""
    graph = ir.load(folder / MODEL_FILE).graph
    kept, scales = float_outputs(graph), scale_type(graph)
    table = model.get_input_embeddings().weight
    ends = {id(table), id(getattr(model.get_output_embeddings(), "weight", None))}
    done: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() != 2 or id(parameter) in done:
                    continue
                done.add(id(parameter))
                rows = parameter.T if isinstance(module, Conv1D) else parameter  # [outputs, inputs]
                block_size = settings.table_block_size(rows.shape[1]) if parameter is table else settings.block_size
                how = settings.of_table if id(parameter) in ends else settings
                exact = packed is not None and packed.origin(rows.numpy()) is not None
                if block_size is not None and not exact and _key(rows[0].numpy()) not in kept:
                    rows.copy_(torch.from_numpy(rounded(rows, block_size, how, scales)))


def scale_type(graph: ir.Graph) -> np.dtype[Any]:
    """What the scales of `graph` are, float32 or float16, in which its weights were rounded."""
    scales = (node.inputs[2].const_value for node in graph if node.op_type == "MatMulNBits" and node.inputs[2])
    return np.dtype(next((tensor.dtype.numpy() for tensor in scales if tensor is not None), np.float32))


def float_outputs(graph: ir.Graph) -> set[bytes]:
    """The beginnings of all outputs of all matrices that `graph` holds in a float type, read as rows and as columns."""
    found: set[bytes] = set()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and len(tensor.shape) == 2 and tensor.dtype in _FLOATS:
            array = stored_array(tensor)
            found |= {_key(row) for row in array[:, :_COMPARED]}
            found |= {_key(column) for column in array[:_COMPARED].T}
    return found


def _key(output: np.ndarray) -> bytes:
    return np.ascontiguousarray(output[:_COMPARED], dtype=np.float32).tobytes()


def rounded(
    rows: torch.Tensor, block_size: int, settings: Quantisation, scales: np.dtype[Any] = _FLOAT32
) -> np.ndarray:
    """`rows` [outputs, inputs] as their blocks hold them, float32. scales: the type that they are rounded in."""
    array = rows.numpy().astype(scales)
    outputs, inputs = array.shape
    shape = BlocksShape(outputs, inputs, settings.bits, block_size, settings.is_symmetric)
    blocks = quantise_weight(lambda start, stop: array[start:stop], shape, settings, array.dtype)
    return np.ascontiguousarray(dequantise(blocks, shape))

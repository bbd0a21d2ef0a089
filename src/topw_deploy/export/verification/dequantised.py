"""Change model and graph so that a quantised export can be compared tightly.

`dequantise_model` rounds the torch weights with the same quantiser. Blocks lie within one output, so fused weights do
not matter.

`exact_products` computes products in float32. MatMulNBits and QMoE at accuracy level 4, and QMoE of 8 bits at any,
round activations to 8 bits, which is not an error of the export. Without that, graph and model agree up to float32
rounding.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from topw_deploy.errors import VerificationError
from topw_deploy.export.graph.table import stored_array
from topw_deploy.export.quantise.blocks import BlocksShape, dequantise, quantise_weight
from topw_deploy.export.quantise.experts import keeps_codes
from topw_deploy.export.quantise.products import FLOATS
from topw_deploy.export.quantise.scheme import Quantisation
from topw_deploy.export.quantise.stored_rows import StoredRows
from topw_deploy.manifest import MODEL_NAME, DecoderManifest, describe_files, save_manifest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_FLOAT32 = np.dtype(np.float32)
_ACCURACY_FLOAT32 = 1  # accuracy_level
_QMOE_PRODUCTS = "ORT_QMOE_CPU_QNBIT_GEMM"  # read by onnxruntime 1.31
_COMPARED = 64  # leading weights that identify an output


def dequantise_model(
    model: PreTrainedModel, folder: Path, scheme: Quantisation, stored: StoredRows | None = None
) -> None:
    """Round the matrices of `model` in place.

    Skips matrices that the export keeps in float, and those in `stored`, which are already rounded.
    """
    import torch  # ONNX comparisons need no torch
    from transformers.pytorch_utils import Conv1D

    graph = ir.load(folder / MODEL_NAME).graph
    kept, scales = float_outputs(graph), scale_type(graph)
    table = model.get_input_embeddings().weight
    ends = {id(table), id(getattr(model.get_output_embeddings(), "weight", None))}
    with torch.no_grad():
        done = _dequantise_experts(model, kept, scheme, stored, scales)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() != 2 or id(parameter) in done:
                    continue
                done.add(id(parameter))
                rows = parameter.T if isinstance(module, Conv1D) else parameter  # [outputs, inputs]
                block_size = scheme.table_block_size(rows.shape[1]) if parameter is table else scheme.block_size
                how = scheme.of_table if id(parameter) in ends else scheme
                exact = stored is not None and stored.origin(rows.numpy()) is not None
                if block_size is not None and not exact and _output(rows) not in kept:
                    rows.copy_(torch.from_numpy(rounded(rows, block_size, how, scales)))


def _dequantise_experts(
    model: PreTrainedModel,
    kept: set[bytes],
    scheme: Quantisation,
    stored: StoredRows | None,
    scales: np.dtype[Any],
) -> set[int]:
    """Round the matrices of experts in place. Returns the ids of all their parameters."""
    import torch

    from topw_deploy.export.trace.experts import expert_matrices

    def kept_codes(matrix: torch.Tensor) -> bool:
        origin = None if stored is None else stored.origin(matrix.reshape(-1, matrix.shape[2]).numpy())
        return origin is not None and keeps_codes(origin)

    matrices = [matrix for module in model.modules() for matrix in expert_matrices(module)]
    found = [matrix for matrix in matrices if _output(matrix.flatten(0, 1)) not in kept and not kept_codes(matrix)]
    block_size = scheme.experts_block_size({matrix.shape[2] for matrix in found})
    if block_size is not None:
        for matrix in found:
            rows = matrix.reshape(-1, matrix.shape[2])  # [experts * outputs, inputs]
            matrix.copy_(torch.from_numpy(rounded(rows, block_size, scheme, scales)).view(matrix.shape))
    return {id(matrix if matrix._base is None else matrix._base) for matrix in matrices}


def scale_type(graph: ir.Graph) -> np.dtype[Any]:
    """Type of `graph`'s scales, used for rounding."""
    scales = (node.inputs[2].const_value for node in graph if node.op_type == "MatMulNBits" and node.inputs[2])
    return np.dtype(next((tensor.dtype.numpy() for tensor in scales if tensor is not None), np.float32))


def float_outputs(graph: ir.Graph) -> set[bytes]:
    """The leading weights of each row and column of a float matrix in the graph."""
    found: set[bytes] = set()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        if len(tensor.shape) == 3:  # of experts, [E, N, K]
            found |= {_key(row) for row in stored_array(tensor).reshape(-1, tensor.shape[2])[:, :_COMPARED]}
        if len(tensor.shape) == 2:
            array = stored_array(tensor)
            found |= {_key(row) for row in array[:, :_COMPARED]}
            found |= {_key(column) for column in array[:_COMPARED].T}
    return found


def _output(rows: torch.Tensor) -> bytes:
    """The key of an output of `rows` [outputs, inputs]: the first that is not zero, as a padding token's is."""
    return _key(rows[int(rows[:, :_COMPARED].any(dim=1).byte().argmax())].numpy())


def _key(output: np.ndarray) -> bytes:
    return np.ascontiguousarray(output[:_COMPARED], dtype=np.float32).tobytes()


def rounded(rows: torch.Tensor, block_size: int, scheme: Quantisation, scales: np.dtype[Any] = _FLOAT32) -> np.ndarray:
    """Quantise and dequantise `rows` [outputs, inputs] to float32."""
    array = rows.numpy().astype(scales)
    outputs, inputs = array.shape
    shape = BlocksShape(outputs, inputs, scheme.bits, block_size, scheme.is_symmetric)
    blocks = quantise_weight(lambda start, stop: array[start:stop], shape, scheme, array.dtype)
    return np.ascontiguousarray(dequantise(blocks, shape))


@contextlib.contextmanager
def exact_products(folder: Path, manifest: DecoderManifest) -> Iterator[Path]:
    """A temporary copy of `folder` whose quantised products compute in float32; `folder` itself if they already do.

    QMoE of 8 bits has no attribute for it, but a variable of the environment, which sessions opened in the block read.

    Hard-links data files where possible. Raises VerificationError if the copy cannot be created beside `folder`.
    """
    with _environment(_QMOE_PRODUCTS, "fp32"):
        yield from _exact_folder(folder, manifest)


def _exact_folder(folder: Path, manifest: DecoderManifest) -> Iterator[Path]:
    if manifest.decoder.quantisation.get("accuracy_level", 0) in (0, _ACCURACY_FLOAT32):
        yield folder
        return
    try:
        made = Path(tempfile.mkdtemp(prefix=".topw-exact-", dir=folder.parent))
    except OSError as error:
        raise VerificationError(
            f"{folder.parent} cannot be written ({error.strerror}), but verification needs a temporary variant of the "
            "graph there; copy the folder and verify the copy."
        ) from error
    try:
        for name in manifest.files.keys() - {MODEL_NAME}:
            (made / name).parent.mkdir(exist_ok=True, parents=True)
            _link_or_copy(folder / name, made / name)
        _write_exact(folder / MODEL_NAME, made / MODEL_NAME)
        files = manifest.files | describe_files(made, [MODEL_NAME])
        save_manifest(made, replace(manifest, files=files))
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_exact(source: Path, target: Path) -> None:
    model = ir.load(source)
    for node in model.graph:
        if node.op_type in ("MatMulNBits", "QMoE") and "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", _ACCURACY_FLOAT32)
    ir.save(model, target)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

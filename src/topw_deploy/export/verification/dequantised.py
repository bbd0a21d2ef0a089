"""Change the model and the graph of a quantised export so that both agree up to float32 rounding.

`dequantise_model` rounds the torch weights with the quantiser of the export. A block lies within one output, so it does
not matter that the graph has fused weights.

`exact_copy` makes the graph compute products in float32. Otherwise MatMulNBits and QMoE at accuracy level 4, and QMoE
of 8 bits at any level, round activations to 8 bits, which is not an error of the export.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from msgspec.structs import replace

from topw_deploy.errors import VerificationError
from topw_deploy.export.embedding import stored_array
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
_FLOAT32_LEVEL = 1  # the accuracy_level of products in float32
_QMOE_PRODUCTS = "ORT_QMOE_CPU_QNBIT_GEMM"  # environment variable that onnxruntime 1.31 reads
_KEY_WEIGHTS = 64  # the number of leading weights that identify an output


def dequantise_model(
    model: PreTrainedModel, folder: Path, scheme: Quantisation, stored: StoredRows | None = None
) -> None:
    """Round the matrices of `model` in place, as the export in `folder` rounds them.

    Skips matrices that the export keeps in float, and those in `stored`, which the checkpoint stores quantised.
    """
    import torch  # ONNX comparisons need no torch
    from transformers.pytorch_utils import Conv1D

    graph = ir.load(folder / MODEL_NAME).graph
    kept, scales = float_output_keys(graph), scale_type(graph)
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
                how = scheme.table_scheme if id(parameter) in ends else scheme
                exact = stored is not None and stored.origin(rows.numpy()) is not None
                if block_size is not None and not exact and _output_key(rows) not in kept:
                    rows.copy_(torch.from_numpy(round_to_blocks(rows, block_size, how, scales)))


def _dequantise_experts(
    model: PreTrainedModel,
    kept: set[bytes],
    scheme: Quantisation,
    stored: StoredRows | None,
    scales: np.dtype[Any],
) -> set[int]:
    """Round the matrices of experts in place. Returns `id` of each of their parameters."""
    import torch

    from topw_deploy.export.trace.experts import expert_matrices

    def has_kept_codes(matrix: torch.Tensor) -> bool:
        origin = None if stored is None else stored.origin(matrix.reshape(-1, matrix.shape[2]).numpy())
        return origin is not None and keeps_codes(origin)

    matrices = [matrix for module in model.modules() for matrix in expert_matrices(module)]
    found = [
        matrix for matrix in matrices if _output_key(matrix.flatten(0, 1)) not in kept and not has_kept_codes(matrix)
    ]
    block_size = scheme.experts_block_size({matrix.shape[2] for matrix in found})
    if block_size is not None:
        for matrix in found:
            rows = matrix.reshape(-1, matrix.shape[2])  # [experts * outputs, inputs]
            matrix.copy_(torch.from_numpy(round_to_blocks(rows, block_size, scheme, scales)).view(matrix.shape))
    return {id(matrix if matrix._base is None else matrix._base) for matrix in matrices}


def scale_type(graph: ir.Graph) -> np.dtype[Any]:
    """The element type of the graph's scales, in which weights are rounded; float32 if it has none."""
    scales = (node.inputs[2].const_value for node in graph if node.op_type == "MatMulNBits" and node.inputs[2])
    return np.dtype(next((tensor.dtype.numpy() for tensor in scales if tensor is not None), np.float32))


def float_output_keys(graph: ir.Graph) -> set[bytes]:
    """The keys of all outputs that the graph keeps in float: of each row and each column of its float matrices."""
    found: set[bytes] = set()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS:
            continue
        if len(tensor.shape) == 3:  # experts [E, N, K]
            found |= {_key_of(row) for row in stored_array(tensor).reshape(-1, tensor.shape[2])[:, :_KEY_WEIGHTS]}
        if len(tensor.shape) == 2:
            array = stored_array(tensor)
            found |= {_key_of(row) for row in array[:, :_KEY_WEIGHTS]}
            found |= {_key_of(column) for column in array[:_KEY_WEIGHTS].T}
    return found


def _output_key(rows: torch.Tensor) -> bytes:
    """The key of the first output of `rows` [outputs, inputs] that is not zero. A padding token's row may be zero."""
    return _key_of(rows[int(rows[:, :_KEY_WEIGHTS].any(dim=1).byte().argmax())].numpy())


def _key_of(output: np.ndarray) -> bytes:
    """The leading weights of an output, as bytes."""
    return np.ascontiguousarray(output[:_KEY_WEIGHTS], dtype=np.float32).tobytes()


def round_to_blocks(
    rows: torch.Tensor, block_size: int, scheme: Quantisation, scales: np.dtype[Any] = _FLOAT32
) -> np.ndarray:
    """Quantise and dequantise `rows` [outputs, inputs]. Returns float32. scales: the type in which they are rounded."""
    array = rows.numpy().astype(scales)
    outputs, inputs = array.shape
    shape = BlocksShape(outputs, inputs, scheme.bits, block_size, scheme.symmetric)
    blocks = quantise_weight(lambda start, stop: array[start:stop], shape, array.dtype)
    return np.ascontiguousarray(dequantise(blocks, shape))


@contextlib.contextmanager
def exact_copy(folder: Path, manifest: DecoderManifest) -> Iterator[Path]:
    """A context manager that yields a temporary copy of `folder` whose quantised products compute in float32.

    Yields `folder` itself if its products do so already. QMoE of 8 bits has no attribute for this, but an environment
    variable, which sessions read that are opened inside the context. Data files are hard-linked where possible.

    Raises VerificationError if the copy cannot be created beside `folder`.
    """
    with _environment(_QMOE_PRODUCTS, "fp32"):
        yield from _open_exact_copy(folder, manifest)


def _open_exact_copy(folder: Path, manifest: DecoderManifest) -> Iterator[Path]:
    if manifest.decoder.quantisation.get("accuracy_level", 0) in (0, _FLOAT32_LEVEL):
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
    """Write the graph with products in float32."""
    model = ir.load(source)
    for node in model.graph:
        if node.op_type in ("MatMulNBits", "QMoE") and "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", _FLOAT32_LEVEL)
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

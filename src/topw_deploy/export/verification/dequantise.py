"""Put the weights that a written graph stands for into the torch model, so that the other checks compare the same ones.

A quantised weight of the graph is named after its parameters, but may join several, and order rows in its own way. So
rows are paired by their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import number_attribute
from topw_deploy.export.quantise.blocks import StoredRows, WeightBlocks, decode_blocks, pack_codes
from topw_deploy.export.quantise.rounding import Quantisation
from topw_deploy.manifest import MODEL_NAME, Check, Note

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_INPUTS = {
    "MatMulNBits": ((1, 2, 3),),
    "MatMulNBitsWithOffsets": ((1, 2, 3),),
    "GatherBlockQuantized": ((0, 2, 3),),
    "QMoE": ((2, 3, 11), (5, 6, 12)),
    "DequantizeLinear": ((0, 1, 2),),
}
"""Operator -> the places of codes, scales and zero points among its inputs."""
_BITS = {"QMoE": "expert_weight_bits"}
# The root of the mean square of (float weight - rounded weight) / scale, over a matrix. Rounding to nearest gives 0.29,
# for a text up to 0.62, and zero points that are off by one at least 1. Weights with more bits than the scheme's are
# measured in its larger steps, because a text moves them as far as the others.
_LARGEST_STEPS = 0.8
_ALIKE = 0.5  # least cosine of a row and its rounded form
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class CodedMatrices:
    """A quantised weight of a graph: one matrix, or those of all experts.

    name: of the initializer.
    codes, scales, zeros: their data, [matrices, outputs, ...]; zeros are None for a symmetric weight.
    """

    name: str
    bits: int
    inputs: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None

    def decode(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """One matrix and the scale of each of its weights, float32 [outputs, inputs] each."""
        zeros = None if self.zeros is None else self.zeros[number]
        scales = self.scales[number]
        values = decode_blocks(WeightBlocks(self.codes[number], scales, zeros), self.bits, self.inputs)
        size = self.codes[number].shape[-1] * 8 // self.bits
        return values, np.repeat(scales.astype(np.float32), size, axis=1)[:, : self.inputs]


def coded_matrices(graph: ir.Graph) -> Iterator[CodedMatrices]:
    """The quantised weights of a graph, each once."""
    seen: set[str] = set()
    for node in graph:
        bits = int(number_attribute(node, _BITS.get(node.op_type, "bits"), 4))
        for places in _INPUTS.get(node.op_type, ()):
            values = [node.inputs[place] if place < len(node.inputs) else None for place in places]
            codes, scales, zeros = (
                None if value is None or value.const_value is None else value.const_value.numpy() for value in values
            )
            name = str(values[0].name) if values[0] is not None else ""
            if codes is None or scales is None or name in seen:
                continue  # a tied head's codes are the reshaped table's
            seen.add(name)
            if node.op_type == "DequantizeLinear":  # has signed codes
                bits = 8 if codes.dtype == np.int8 else 4
                codes = pack_codes((codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8), bits)
            count = scales.shape[0] if "K" not in node.attributes and scales.ndim == 3 else 1
            blocks = scales.reshape(count, -1, scales.shape[-1])
            whole = codes.reshape(*blocks.shape, -1)
            inputs = int(number_attribute(node, "K", blocks.shape[2] * whole.shape[3] * 8 // bits))
            packed = None if zeros is None else zeros.reshape(*blocks.shape[:2], -1)
            yield CodedMatrices(name, bits, inputs, whole, blocks, packed)


def dequantise_model(
    model: PreTrainedModel, folder: Path, scheme: Quantisation, stored: StoredRows | None = None
) -> tuple[Check, Note]:
    """Replace the matrices of `model` in place by what the graph in `folder` has in their place.

    Skips matrices that the graph has in float, and those in `stored`, whose codes the graph keeps.

    Returns the check that the graph's weights are the model's, rounded, and a note about their bits.
    """
    import torch  # ONNX comparisons need no torch
    from transformers.pytorch_utils import Conv1D

    from topw_deploy.export.trace.experts import expert_matrices

    coded = list(coded_matrices(ir.load(folder / MODEL_NAME).graph))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    table = model.get_input_embeddings().weight
    done: set[int] = set()
    steps: list[float] = []

    def is_kept(rows: torch.Tensor, *, of_table: bool = False, of_experts: bool = False) -> bool:
        found = None if stored is None else stored.find(rows.numpy(), scheme.bits)
        return found is not None and (not of_table or found.fits_table) and (not of_experts or found.fits_experts)

    with torch.no_grad():
        for module in model.modules():
            for matrices in expert_matrices(module):  # [experts, outputs, inputs]
                parameter = matrices if matrices._base is None else matrices._base
                done.add(id(parameter))
                if not is_kept(matrices.reshape(-1, matrices.shape[2]), of_experts=True):
                    named = [one for one in coded if _is_named(one, names.get(id(parameter), []))]
                    steps += _replace(matrices, named or coded, scheme.bits)
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 2 and id(parameter) not in done:
                    done.add(id(parameter))
                    rows = parameter.T if isinstance(module, Conv1D) else parameter  # [outputs, inputs]
                    if not is_kept(rows, of_table=parameter is table):
                        own = [one for one in coded if _is_named(one, names[id(parameter)])]
                        steps += _replace(rows[None], own, scheme.bits)
    worst = max(steps, default=0.0)
    detail = f"root of the mean square of a matrix; {len(steps)} matrices"
    ends = [*names[id(table)], *names.get(id(getattr(model.get_output_embeddings(), "weight", None)), [])]
    products, others = (
        average_bits([one for one in coded if _is_named(one, ends) == is_end]) for is_end in (False, True)
    )
    text = f"{products:.2f} in products" + (f", {others:.2f} in table and head" if others else "")
    note = Note("bits a weight, with scales and zero points", text)
    return Check("rounding of the weights, in steps", worst <= _LARGEST_STEPS, worst, _LARGEST_STEPS, detail), note


def average_bits(coded: list[CodedMatrices]) -> float:
    """The stored bits of these weights, divided by their number; 0 if there are none."""
    size = sum(one.codes.nbytes + one.scales.nbytes + (0 if one.zeros is None else one.zeros.nbytes) for one in coded)
    count = sum(one.scales.shape[0] * one.scales.shape[1] * one.inputs for one in coded)
    return 8 * size / max(1, count)


def _is_named(coded: CodedMatrices, names: list[str]) -> bool:
    return any(name in coded.name for name in names)


def _replace(matrices: torch.Tensor, coded: list[CodedMatrices], bits: int) -> list[float]:
    """Replace `matrices`, [matrices, outputs, inputs], by those of the first of `coded` that are theirs, rounded.

    Returns the error of each in steps of this many bits; [] if no one is theirs.
    """
    import torch

    for one in coded:
        if (len(one.codes), one.inputs) != (matrices.shape[0], matrices.shape[2]):
            continue
        steps = []
        for number, matrix in enumerate(matrices):
            values, scales = one.decode(number)
            found = _pair_rows(matrix.numpy(), values, scales * 2.0 ** max(0, one.bits - bits))
            if found is None:
                break
            matrix.copy_(torch.from_numpy(found[0]))
            steps.append(found[1])
        if steps:
            return steps
    return []


def _pair_rows(rows: np.ndarray, values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Find each of `rows`, [n, inputs], in a decoded matrix, [m, inputs] with m >= n.

    Returns the rounded rows and their error in steps; None if the rows are not in the matrix.
    """
    sizes, lengths = np.linalg.norm(rows, axis=1), np.linalg.norm(values, axis=1) + _TINY
    first = int(np.argmax(sizes > 0))  # the row of a padding token may be zero
    start = int(np.argmax(values @ rows[first] / lengths)) - first
    order = np.arange(start, start + len(rows)) % len(values)
    if not _are_alike(rows, values[order], sizes):
        order = np.argmax(rows @ (values / lengths[:, None]).T, axis=1)
        if not _are_alike(rows, values[order], sizes):
            return None
    scale = np.abs(scales[order])
    steps = np.divide(rows - values[order], scale, out=np.zeros_like(rows), where=scale > 0)
    return values[order], float(np.sqrt(np.square(steps).mean()))


def _are_alike(rows: np.ndarray, others: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether each row has nearly the direction of the other. sizes: the rows' lengths; a row of zeros has none."""
    products = np.einsum("ij,ij->i", rows, others)
    return bool((products >= _ALIKE * sizes * np.linalg.norm(others, axis=1)).all() and (others[sizes == 0] == 0).all())

"""Quantise the matrices of experts: MoE becomes QMoE, a Gather of matrices GatherBlockQuantized.

QMoE multiplies activations of 8 bits, and float32 ones with weights of 4 bits at another `accuracy_level` than 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor
from topw_deploy.export.graph.lazy_weight import LazyWeight, Read
from topw_deploy.export.quantise.products import stored_tensor
from topw_deploy.export.quantise.scheme import Quantisation
from topw_deploy.export.quantise.stored_rows import Origin, StoredRows
from topw_deploy.export.quantise.weight import QuantisedWeight, RecentBlocks

DOMAIN = "com.microsoft"
OPERATOR = "QMoE"
_SINCE, _LEVELS_SINCE = "1.30", "1.31"  # tested; the first with `accuracy_level`
_INT8_ACTIVATIONS = 4  # accuracy_level
_MATRICES = (2, 4)  # inputs of MoE: of each, its bias follows


@dataclass(frozen=True)
class ExpertWeight:
    """Matrices of all experts, [E, N, K].

    place: input of `node`, a MoE or Gather.
    """

    node: ir.Node
    place: int
    value: ir.Value
    tensor: ir.TensorProtocol

    @property
    def names(self) -> tuple[str | None, ...]:
        """Names for patterns to match."""
        return self.node.name, self.value.name

    @property
    def sizes(self) -> tuple[int, int, int]:
        experts, outputs, inputs = (int(size) for size in self.tensor.shape)
        return experts, outputs, inputs


def find_experts(graph: ir.Graph) -> list[ExpertWeight]:
    """Stored matrices of experts, in order."""
    return list(_weights(graph))


def least_onnxruntime(graph: ir.Graph) -> str:
    """The first onnxruntime version that runs the experts of `graph`, "" for any."""
    nodes = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)]
    leveled = any("accuracy_level" in node.attributes for node in nodes)
    return (_LEVELS_SINCE if leveled else _SINCE) if nodes else ""


def _weights(graph: ir.Graph) -> Iterator[ExpertWeight]:
    for node in graph:
        places: tuple[int, ...] = ()
        if (node.domain, node.op_type) == (DOMAIN, "MoE"):
            places = _MATRICES
        elif (node.domain, node.op_type) == ("", "Gather") and not _number(node, "axis"):
            places = (0,)
        for place in places:
            value = node.inputs[place]
            tensor = stored_tensor(value, 3)
            if value is not None and tensor is not None:
                yield ExpertWeight(node, place, value, tensor)


def keeps_codes(origin: Origin) -> bool:
    """Whether experts can take a quantised checkpoint's codes: QMoE reads the zero points of one block as rows'."""
    return origin.order is None and (origin.shape.symmetric or origin.shape.blocks > 1)


class ExpertsReplacer:
    """Replaces nodes of experts by quantised ones.

    kept: nodes that keep a quantised checkpoint's codes.
    """

    def __init__(
        self, editor: GraphEditor, scheme: Quantisation, stored: StoredRows | None, recent: RecentBlocks
    ) -> None:
        self.kept = 0
        self.scale_names: set[str | None] = set()
        self._editor, self._scheme, self._stored_rows, self._recent = editor, scheme, stored, recent

    def replace(self, weights: Iterable[ExpertWeight]) -> int:
        """Replace nodes all of whose matrices are in `weights`. Returns the number of nodes.

        Experts without codes of their own have one block size; if none fits, they stay float.
        """
        by_node: dict[int, list[ExpertWeight]] = {}
        for weight in weights:
            by_node.setdefault(id(weight.node), []).append(weight)
        whole = [found for found in by_node.values() if len(found) == len(_MATRICES) or found[0].place == 0]
        made = [(found, self._kept(found)) for found in whole]
        widths = {weight.sizes[2] for found, kept in made if kept is None for weight in found}
        block_size, replaced = self._scheme.experts_block_size(widths), 0
        for found, kept in made:
            if kept is None and block_size is not None:
                kept = [self._quantised(weight, block_size) for weight in found]
            if kept is not None:
                self._replace(found, kept)
                replaced += 1
        return replaced

    def _quantised(self, weight: ExpertWeight, block_size: int) -> QuantisedWeight:
        return QuantisedWeight.of_tensor(
            _rows(weight),
            by_output=True,
            block_size=block_size,
            scheme=self._scheme,
            recent=self._recent,
            experts=weight.sizes[0],
        )

    def _kept(self, found: list[ExpertWeight]) -> list[QuantisedWeight] | None:
        """The checkpoint's own codes, if one node can take them."""
        stored = self._stored_rows
        if stored is None or any(weight.tensor.dtype != ir.DataType.FLOAT for weight in found):
            return None
        origins = [stored.origin(_rows(weight).numpy()) for weight in found]
        shapes = [origin.shape for origin in origins if origin is not None and keeps_codes(origin)]
        if len(shapes) < len(found) or len({(shape.bits, shape.block_size) for shape in shapes}) > 1:
            return None
        self.kept += 1
        return [
            QuantisedWeight(
                origin.shape,
                ir.DataType.FLOAT,
                lambda origin=origin: stored.blocks(origin),  # type: ignore[misc]
                self._recent,
                experts=weight.sizes[0],
            )
            for weight, origin in zip(found, origins, strict=True)
            if origin is not None
        ]

    def _replace(self, found: list[ExpertWeight], made: list[QuantisedWeight]) -> None:
        node, shape = found[0].node, made[0].shape
        stored = [self._stored(*pair) for pair in zip(found, made, strict=True)]
        inputs: list[ir.Value | None]
        if node.op_type == "MoE":
            biases = [node.inputs[place + 1] if len(node.inputs) > place + 1 else None for place in _MATRICES]
            (codes, scales, zeros), (codes_down, scales_down, zeros_down) = stored
            inputs = [*node.inputs[:2], codes, scales, biases[0], codes_down, scales_down, biases[1]]
            inputs += [None, None, None, zeros, zeros_down]
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            attributes |= {"expert_weight_bits": shape.bits, "block_size": shape.block_size}
            if self._scheme.accuracy_level == _INT8_ACTIVATIONS:
                attributes["accuracy_level"] = _INT8_ACTIVATIONS
            op_type = OPERATOR
        else:
            codes, scales, zeros = stored[0]
            if zeros is None:  # absent ones are 0 in some versions, see `_Replacer.table`
                middle = self._editor.unique(f"{found[0].value.name}_zero_points")
                zeros = self._editor.initializer(made[0].middle(), middle)
            inputs = [codes, node.inputs[1], scales, zeros]
            attributes = {"bits": shape.bits, "block_size": shape.block_size, "gather_axis": 0, "quantize_axis": 2}
            op_type = "GatherBlockQuantized"
        while inputs[-1] is None:
            inputs.pop()
        old = node.outputs[0]
        new = ir.node(op_type, inputs, attributes=attributes, domain=DOMAIN, name=f"{node.name}_Q{shape.bits}")
        new.outputs[0].type, new.outputs[0].shape = old.type, old.shape
        self._editor.graph.insert_before(node, new)
        self._editor.replace(node, new.outputs[0])

    def _stored(self, weight: ExpertWeight, made: QuantisedWeight) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Codes, scales and zero points; consecutive, for RecentBlocks."""
        name, editor = str(weight.value.name), self._editor
        codes = editor.initializer(made.codes(), editor.unique(f"{name}_Q{made.shape.bits}"))
        scales = editor.initializer(made.scales(), editor.unique(f"{name}_scales"))
        self.scale_names.add(scales.name)
        zeros = made.zero_points()
        kept = None if zeros is None else editor.initializer(zeros, editor.unique(f"{name}_zero_points"))
        return codes, scales, kept


def _rows(weight: ExpertWeight) -> LazyWeight:
    """[E * N, K], read in whole experts."""
    experts, outputs, inputs = weight.sizes
    tensor = weight.tensor

    def whole() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().reshape(-1, inputs), dtype=tensor.dtype)

    def read(source: Read, index: slice) -> np.ndarray:
        first, last = index.start // outputs, math.ceil(index.stop / outputs)
        part = source(slice(first, last)).reshape(-1, inputs)
        return np.asarray(part[index.start - first * outputs : index.stop - first * outputs])

    kept = partial(read, tensor.read) if isinstance(tensor, LazyWeight) and tensor.read is not None else None
    return LazyWeight((id(tensor), "rows"), tensor.dtype, (experts * outputs, inputs), whole, kept, weight.value.name)


def _number(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0

"""Quantise the matrices of experts: an MoE node becomes QMoE, a Gather of matrices becomes GatherBlockQuantized.

QMoE multiplies activations rounded to 8 bits. It multiplies float32 activations only with 4-bit weights and an
`accuracy_level` other than 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from topw_deploy.export.graph import GraphEditor, LazyWeight, Read, number_attribute, stored_tensor
from topw_deploy.export.quantise.blocks import Origin, QuantisedWeight, RecentBlocks, StoredRows
from topw_deploy.export.quantise.rounding import Quantisation

DOMAIN = "com.microsoft"
OPERATOR = "QMoE"
_SINCE = "1.30"  # the first onnxruntime whose QMoE is tested here
_LEVELS_SINCE = "1.31"  # the first whose QMoE has `accuracy_level`
_INT8_ACTIVATIONS = 4  # the accuracy_level of activations rounded to int8
_MATRICES = (2, 4)  # the inputs of MoE that are matrices; the input after each is its bias


@dataclass(frozen=True)
class ExpertWeight:
    """One matrix of all experts of a layer, [experts, outputs, inputs].

    node: the MoE or Gather node that uses it.
    place: the input of `node`.
    value, tensor: the initializer and its data.
    """

    node: ir.Node
    place: int
    value: ir.Value
    tensor: ir.TensorProtocol

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names that exclude patterns can match."""
        return self.node.name, self.value.name

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        experts, outputs, inputs = (int(size) for size in self.tensor.shape)
        return experts, outputs, inputs


def find_experts(graph: ir.Graph) -> list[ExpertWeight]:
    """Return the experts' matrices that are initializers, in the order of the graph."""
    return list(_expert_weights(graph))


def least_onnxruntime(graph: ir.Graph) -> str:
    """Return the first onnxruntime version that runs the experts of `graph`; "" if any version does."""
    nodes = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, OPERATOR)]
    leveled = any("accuracy_level" in node.attributes for node in nodes)
    return (_LEVELS_SINCE if leveled else _SINCE) if nodes else ""


def _expert_weights(graph: ir.Graph) -> Iterator[ExpertWeight]:
    for node in graph:
        places: tuple[int, ...] = ()
        if (node.domain, node.op_type) == (DOMAIN, "MoE"):
            places = _MATRICES
        elif (node.domain, node.op_type) == ("", "Gather") and number_attribute(node, "axis", 0) == 0:
            places = (0,)
        for place in places:
            value = node.inputs[place]
            tensor = stored_tensor(value, 3)
            if value is not None and tensor is not None:
                yield ExpertWeight(node, place, value, tensor)


def keeps_codes(origin: Origin) -> bool:
    """Whether experts can use a checkpoint's codes unchanged.

    They cannot if inputs must be reordered, or if asymmetric rows have a single block: QMoE then reads the zero points
    of blocks as those of rows.
    """
    return origin.order is None and (origin.shape.symmetric or origin.shape.blocks > 1)


class ExpertsReplacer:
    """Replaces the nodes of experts by quantised ones.

    kept: the number of nodes that keep a quantised checkpoint's codes.
    scale_names: the names of the scales' initializers.
    """

    def __init__(
        self, editor: GraphEditor, scheme: Quantisation, stored: StoredRows | None, recent: RecentBlocks
    ) -> None:
        self.kept = 0
        self.scale_names: set[str | None] = set()
        self._editor, self._scheme, self._stored_rows, self._recent = editor, scheme, stored, recent

    def replace(self, weights: Iterable[ExpertWeight]) -> int:
        """Replace each node whose matrices are all in `weights`. Returns the number of replaced nodes.

        Experts that do not keep a checkpoint's codes get one block size. If none fits, they stay float.
        """
        by_node: dict[int, list[ExpertWeight]] = {}
        for weight in weights:
            by_node.setdefault(id(weight.node), []).append(weight)
        whole = [found for found in by_node.values() if len(found) == len(_MATRICES) or found[0].place == 0]
        made = [(found, self._kept_codes(found)) for found in whole]
        widths = {weight.sizes[2] for found, kept in made if kept is None for weight in found}
        block_size, replaced = self._scheme.experts_block_size(widths), 0
        for found, kept in made:
            if kept is None and block_size is not None:
                kept = [self._quantise_experts(weight, block_size) for weight in found]
            if kept is not None:
                self._replace(found, kept)
                replaced += 1
        return replaced

    def _quantise_experts(self, weight: ExpertWeight, block_size: int) -> QuantisedWeight:
        return QuantisedWeight.of_tensor(
            _stacked_rows(weight),
            by_output=True,
            block_size=block_size,
            scheme=self._scheme,
            recent=self._recent,
            experts=weight.sizes[0],
        )

    def _kept_codes(self, found: list[ExpertWeight]) -> list[QuantisedWeight] | None:
        """Return the matrices of one node with the checkpoint's own codes; None if the node cannot use these."""
        stored = self._stored_rows
        if stored is None or any(weight.tensor.dtype != ir.DataType.FLOAT for weight in found):
            return None
        origins = [stored.origin(_stacked_rows(weight).numpy()) for weight in found]
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
        stored = [self._add_initializers(*pair) for pair in zip(found, made, strict=True)]
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
            if zeros is None:  # some versions take absent zero points as 0, see `_Replacer.quantise_table`
                middle = self._editor.unique(f"{found[0].value.name}_zero_points")
                zeros = self._editor.initializer(made[0].middle_zero_points(), middle)
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

    def _add_initializers(
        self, weight: ExpertWeight, made: QuantisedWeight
    ) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """Add initializers of codes, scales and zero points, consecutive so that RecentBlocks quantises once."""
        name, editor = str(weight.value.name), self._editor
        codes = editor.initializer(made.codes(), editor.unique(f"{name}_Q{made.shape.bits}"))
        scales = editor.initializer(made.scales(), editor.unique(f"{name}_scales"))
        self.scale_names.add(scales.name)
        zeros = made.zero_points()
        kept = None if zeros is None else editor.initializer(zeros, editor.unique(f"{name}_zero_points"))
        return codes, scales, kept


def _stacked_rows(weight: ExpertWeight) -> LazyWeight:
    """Return the matrices of all experts as one, [experts * outputs, inputs], which reads whole experts."""
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

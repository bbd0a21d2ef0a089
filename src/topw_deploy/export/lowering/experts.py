"""Replace the markers of mixtures of experts (`trace.experts`).

- `experts_operator`: onnxruntime's MoE, which multiplies each token with its own experts.
- `experts_blocks`: standard operators, for other runtimes and for what MoE lacks.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from topw_deploy.export.graph.editor import ROUTER, GraphEditor, fixed_size, required
from topw_deploy.export.graph.lazy_weight import LazyWeight
from topw_deploy.export.lowering import experts_operator
from topw_deploy.export.lowering.experts_blocks import ExpertBlocks, experts_of
from topw_deploy.export.lowering.experts_weights import stored_stack, stored_value
from topw_deploy.export.trace.experts import EXPERTS_OP, PRODUCT_OP
from topw_deploy.export.trace.marker import MARKER_DOMAIN

_PREFIX = "topw.experts"


def lower_experts(model: ir.Model, *, operator: bool, quantised: bool = False) -> int:
    """Replace every marker of experts in place. Returns the number of markers.

    operator: use onnxruntime's operator where it can replace the marker.
    quantised: the operator's matrices will be quantised.
    """
    markers = [
        node for node in model.graph if node.domain == MARKER_DOMAIN and node.op_type in (EXPERTS_OP, PRODUCT_OP)
    ]
    if not markers:
        return 0
    lowering = _Lowering(model, operator=operator, quantised=quantised)
    for marker in markers:
        _mark_router(marker)
        lowering.replace(marker)
    RemoveUnusedNodesPass()(model)
    lowering.editor.finish()
    return len(markers)


class _Lowering:
    def __init__(self, model: ir.Model, *, operator: bool, quantised: bool) -> None:
        self.editor = GraphEditor(model.graph, _PREFIX)
        self._model, self._operator, self._quantised = model, operator, quantised
        self._blocks: dict[int, ExpertBlocks] = {}

    def replace(self, marker: ir.Node) -> None:
        old = marker.outputs[0]
        made = self._product(marker) if marker.op_type == PRODUCT_OP else self._experts(marker)
        made.type, made.shape = old.type, old.shape
        self.editor.replace(marker, made)

    def _experts(self, marker: ir.Node) -> ir.Value:
        matrices = marker.inputs[3:5]
        stacks = [stored_stack(value) for value in matrices]
        reason = experts_operator.refusal(marker, stacks, quantised=self._quantised)
        if self._operator and reason is None:
            self._model.opset_imports[experts_operator.DOMAIN] = 1
            return experts_operator.experts_of(self.editor, marker, [stack for stack in stacks if stack is not None])
        flat = self.editor.op("Reshape", [marker.inputs[1], self.editor.constant([-1])])
        blocks = self._blocks_of(marker.inputs[1], flat, fixed_size(required(matrices[0]), 0))
        return experts_of(
            self.editor, marker, blocks, [self._value(*pair) for pair in zip(matrices, stacks, strict=True)]
        )

    def _product(self, marker: ir.Node) -> ir.Value:
        rows, ids, weight, bias = [*marker.inputs, None][:4]
        blocks = self._blocks_of(ids, ids, fixed_size(required(weight), 0))
        found = blocks.product(blocks.columns(required(rows)), self._value(weight, stored_stack(weight)), bias)
        return blocks.rows(found, fixed_size(required(weight), 1))

    def _blocks_of(self, key: ir.Value | None, ids: ir.Value | None, experts: int) -> ExpertBlocks:
        """The blocks of `ids`, made once for products with the same `key`."""
        if id(key) not in self._blocks:
            self._blocks[id(key)] = ExpertBlocks(self.editor, required(ids), experts)
        return self._blocks[id(key)]

    def _value(self, value: ir.Value | None, stack: LazyWeight | None) -> ir.Value:
        """The weight [E, N, K], stored in this order where possible, so that no call rearranges it."""
        return required(value) if stack is None else stored_value(self.editor, required(value), stack)


def _mark_router(marker: ir.Node) -> None:
    """Mark the products behind a marker's ids and weights as routers: rounding them would change the chosen experts."""
    pending = list(marker.inputs[1 : 2 if marker.op_type == PRODUCT_OP else 3])
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type in ("MatMul", "Gemm"):
            node.metadata_props[ROUTER] = "yes"
        elif node.domain == "":
            pending += node.inputs

"""Drop the threshold of torch's softplus."""

from __future__ import annotations

import onnx_ir as ir

from topw_deploy.export.graph.editor import GraphEditor, rewrite_each
from topw_deploy.export.graph.values import producer

_LEAST = 17.0  # from here on log(1 + exp(-x)) is below half a float32 ulp of x


def drop_softplus_thresholds(model: ir.Model) -> int:
    """Replace Where(x > t, x, Softplus(x)) by Softplus(x) for t >= 17, where both round to x. Returns their number."""
    return rewrite_each(model, "topw.softplus", "Where", _drop)


def _drop(editor: GraphEditor, where: ir.Node) -> bool:
    compared, x, other = where.inputs
    greater, softplus = producer(compared, "Greater"), producer(other, "Softplus")
    if greater is None or softplus is None or greater.inputs[0] is not x or softplus.inputs[0] is not x:
        return False
    threshold = ir.convenience.get_const_tensor(greater.inputs[1]) if greater.inputs[1] is not None else None
    if threshold is None or threshold.size != 1 or float(threshold.numpy().reshape(-1)[0]) < _LEAST:
        return False
    editor.replace(where, softplus.outputs[0])
    return True

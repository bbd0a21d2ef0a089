"""A part of the function whose rounding no whole answer shows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tests.support.small_graphs import run
from topw_deploy.export.sampler.ops import Ops
from topw_deploy.export.sampler.pool import _recompute_nearest, closeness


def test_near_duplicates_keep_their_digits_where_the_product_loses_them() -> None:
    table = np.random.default_rng(0).standard_normal((1, 20, 512)).astype(np.float32)
    table[0, 1] = table[0, 0] + np.float32(1e-4)
    points = table / np.linalg.norm(table, axis=2, keepdims=True) * np.float32(22.6)
    op = Ops(branches=True)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(points.shape))
    products = closeness(op, x, "mahalanobis")
    outputs = [op.Identity(value) for value in (products, _recompute_nearest(op, products, x, 5))]
    graph = ir.Graph([x], outputs, nodes=op.nodes, opset_imports={"": 18}, name="part")
    rough, good = (values[0, 0, 1] for values in run(ir.Model(graph, ir_version=10), x=points))
    exact = np.square(points[0, 0].astype(np.float64) - points[0, 1]).sum()
    assert abs(good - exact) < 1e-5 * exact
    assert abs(rough - exact) > 1e-3 * exact

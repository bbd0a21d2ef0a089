"""Parts of the function, each in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.export.sampler.node import BLOCK
from topw_deploy.export.sampler.ops import Ops
from topw_deploy.export.sampler.pool import _recompute_nearest, closeness
from topw_deploy.export.sampler.thresholds import LONGEST_SORT, Tokens, largest_threshold


def evaluate(body: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    """The tensors that `body` returns for an `Ops` and the arrays."""
    op = Ops(branches=True)
    inputs = [
        ir.Value(name=f"in_{i}", type=ir.TensorType(ir.tensor(array).dtype), shape=ir.Shape(array.shape))
        for i, array in enumerate(arrays)
    ]
    results = body(op, *inputs)
    outputs = [op.Identity(value) for value in (results if isinstance(results, list | tuple) else [results])]
    graph = ir.Graph(inputs, outputs, nodes=op.nodes, opset_imports={"": 18}, name="part")
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    feeds = {value.name: array for value, array in zip(inputs, arrays, strict=True)}
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def test_near_duplicates_keep_their_digits_where_the_product_loses_them() -> None:
    table = np.random.default_rng(0).standard_normal((1, 20, 512)).astype(np.float32)
    table[0, 1] = table[0, 0] + np.float32(1e-4)
    x = table / np.linalg.norm(table, axis=2, keepdims=True) * np.float32(22.6)

    def body(op: Ops, x: ir.Value) -> list[ir.Value]:
        rough = closeness(op, x, "mahalanobis")
        return [rough, _recompute_nearest(op, rough, x, 5)]

    rough, good = (values[0, 0, 1] for values in evaluate(body, x))
    exact = np.square(x[0, 0].astype(np.float64) - x[0, 1]).sum()
    assert abs(good - exact) < 1e-5 * exact
    assert abs(rough - exact) > 1e-3 * exact


@pytest.mark.parametrize("count", [LONGEST_SORT, LONGEST_SORT + 1], ids=["sort", "search"])
@pytest.mark.parametrize("kind", ["normal", "tiny", "extreme", "equal"])
def test_thresholds_are_found_exactly(kind: str, count: int) -> None:
    rng, width = np.random.default_rng(1), 31 * BLOCK
    keys = {
        "normal": rng.standard_normal(width),
        "tiny": rng.standard_normal(width) * 1e-42,
        "extreme": rng.choice([-3e38, -1e30, -1.0, 0.0, 1e-45, 3.4e38], width),
        "equal": np.full(width, -7.25),
    }[kind].astype(np.float32)
    keys[count:] = -np.inf
    limits = np.array([0, 1, 99, 2999, count - 1, count], np.float32)
    grid = np.broadcast_to(keys, (len(limits), width)).reshape(len(limits), 1, -1, BLOCK)

    def body(op: Ops, keys: ir.Value, terms: ir.Value, limit: ir.Value) -> Any:
        tokens = Tokens(*[keys] * 5, count=count, ids=None, descending=keys)
        return largest_threshold(op, tokens, keys, terms, limit)

    found, is_reached = evaluate(body, grid, np.ones_like(grid), limits[:, None])
    places = limits[:-1].astype(int)
    assert np.array_equal(found[:-1, 0, 0, 0], np.sort(keys)[::-1][places])
    assert found[-1].item() == np.finfo(np.float32).min
    assert is_reached[:, 0].tolist() == [True] * len(places) + [False]

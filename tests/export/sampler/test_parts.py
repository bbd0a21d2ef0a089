"""Parts of the function, each in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from topw_deploy.export.sampler.candidates import (
    CandidateLogits,
    block_candidates,
    draw_candidate,
    first_candidates,
    kept_candidates,
)
from topw_deploy.export.sampler.node import BLOCK, PARAMETERS, apply_edits, padded_width, row_parameters
from topw_deploy.export.sampler.ops import Ops
from topw_deploy.export.sampler.pool import _recompute_nearest, closeness
from topw_deploy.export.sampler.thresholds import LONGEST_SORT, Tokens, largest_threshold
from topw_deploy.sampling import apply_edits as reference_edits
from topw_deploy.sampling.parameters import TopWParameters


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


def test_edits_match_the_reference_and_padding_has_no_effect() -> None:
    logits = np.array([[2.0, -1.0, 0.0, 5.0, -3.0], [1, 1, 1, 1, 1]], np.float32)
    ids = np.array([[3, -1, 1, 4], [BLOCK, 10**6, 2, 3]])
    penalty = np.array([[2.0, 9.0, 1.5, 1.0], [1.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([[0.0, 9.0, 0.25, -np.inf], [1, 1, 0, 0]], np.float32)
    (edited,) = evaluate(lambda op, *given: apply_edits(op, 5, *given), logits, ids, penalty, bias)
    assert edited.shape == (2, padded_width(5))
    assert np.array_equal(edited[0, :5], reference_edits(logits[0], ids[0], penalty[0], bias[0]))
    assert (edited[0, 5:] == -np.inf).all()
    # Ids outside the vocabulary change nothing; a penalty that is not positive makes the logit NaN.
    assert np.array_equal(edited[1, :5], [1, 1, np.nan, np.nan, 1], equal_nan=True)


@pytest.mark.parametrize("top_m", [7, 1200])
@pytest.mark.parametrize("vocab", [1, 50, 127, 128, 1009, 20_000])
def test_candidates_are_the_largest_logits_with_their_ids(vocab: int, top_m: int) -> None:
    logits = np.random.default_rng(vocab).standard_normal((2, vocab)).astype(np.float32)
    width, count = padded_width(vocab), min(64, vocab, top_m)

    def body(op: Ops, values: ir.Value) -> list[ir.Value]:
        found = first_candidates(op, block_candidates(op, values, width, vocab), top_m)
        assert found.count == count
        return [found.logits, found.ids]

    found, ids = evaluate(body, np.pad(logits, ((0, 0), (0, width - vocab)), constant_values=-np.inf))
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    assert np.array_equal(ids[:, :count], order)
    assert np.array_equal(found[:, :count], np.take_along_axis(logits, order, 1))
    assert (found[:, count:] == -np.inf).all()


def test_equal_logits_are_drawn_and_kept_in_the_order_of_their_ids() -> None:
    logits = np.array([[3.0, 1.0, 1.0, 1.0, 0.0] + [-np.inf] * 11] * 3, np.float32)
    ids = np.array([[7, 9, 2, 5, 1, *range(20, 31)]] * 3)
    values = {"uniform": [0.0, 0.85, 0.95]} | {n: [getattr(TopWParameters(), n)] * 3 for n in PARAMETERS[:-1]}

    def body(op: Ops, logits: ir.Value, ids: ir.Value, *columns: ir.Value) -> list[ir.Value]:
        shuffled, last = CandidateLogits(logits, ids, 5), op.constant([[2]] * 3)
        drop = op.Sub(logits, op.constant(3.0))
        drawn = draw_candidate(op, shuffled, drop, last, row_parameters(op, columns))
        return [drawn.token, kept_candidates(op, shuffled, last)]

    tokens, kept = evaluate(body, logits, ids, *(np.array(values[name], np.float32) for name in PARAMETERS))
    assert tokens[:, 0].tolist() == [7, 2, 5]
    assert np.flatnonzero(kept[0]).tolist() == [0, 2, 3]


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

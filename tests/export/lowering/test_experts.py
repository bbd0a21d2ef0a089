"""Experts give the literal sum, as onnxruntime's operator and as blocks of standard operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from tests.support.experts import (
    CHOSEN,
    EXPERTS,
    Mixture,
    inputs_of,
    literal,
    mixture_graph,
    random_mixture,
    run,
)
from tests.support.samples import thinned
from topw_deploy.export.lowering.experts import lower_experts

FLOAT32 = 1e-4  # of outputs up to 30, sums of 96 products; measured: 2e-5
HALF = 2e-2  # of the largest output: float16 has 11 bits; measured: 1.4e-3

MIXTURES: dict[str, dict[str, Any]] = {
    "chunked": {},
    "interleaved": {"interleaved": True},
    "clamped": {"alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True, "biases": True},
    "clamped and chunked": {"limit": 0.7, "biases": True},
    "relu": {"activation": "relu", "biases": True},
    "silu": {"activation": "silu"},
    "gelu": {"activation": "gelu"},
    "identity": {"activation": "identity"},
}
FORMS = {"operator": {"operator": True, "positive": True}, "rows": {"operator": True, "positive": False}}
FORMS |= {"blocks": {"operator": False, "positive": True}}


def lowered(mixture: Mixture, form: str) -> ir.Model:
    model = mixture_graph(mixture, positive=FORMS[form]["positive"])
    assert lower_experts(model, operator=FORMS[form]["operator"]) == 1
    model.opset_imports.pop("topw.trace")
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", thinned(MIXTURES.values(), 2), ids=list(MIXTURES))
def test_every_activation_and_layout_gives_the_literal_sum(settings: dict[str, Any], form: str) -> None:
    mixture = random_mixture(**settings)
    model = lowered(mixture, form)
    domains = {node.domain for node in model.graph}
    assert domains == ({""} if form == "blocks" else {"", "com.microsoft"})
    for tokens in (1, 2, 5, 37):
        inputs = inputs_of(tokens)
        np.testing.assert_allclose(run(model, *inputs), literal(mixture, *inputs), atol=FLOAT32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        ([[0, 0], [1, 1], [5, 5]], [[1.0, 2.0], [0.5, 0.5], [0.0, 3.0]]),
        ([[3, 1]] * 9, [[2.0, 1.0]] * 9),
        ([[0, 1], [2, 3]], [[0.0, 0.0], [1e-6, 1e3]]),
        ([[0, 1], [2, 3]], [[1.0, 1.0], [1e-30, 0.0]]),
    ],
    ids=["one expert twice", "all tokens alike", "no weight, far apart", "equal, tiny"],
)
def test_ids_and_weights_of_any_kind_give_the_literal_sum(form: str, ids: Any, weights: Any) -> None:
    mixture = random_mixture()
    chosen, given = np.array(ids), np.array(weights, np.float32)
    inputs = inputs_of(len(chosen))[0], chosen, given
    found, wanted = run(lowered(mixture, form), *inputs), literal(mixture, *inputs)
    np.testing.assert_allclose(found, wanted, atol=FLOAT32 * max(1.0, float(given.max())))


@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_negative_weights_keep_their_sign(form: str) -> None:
    mixture = random_mixture()
    hidden, ids, weights = inputs_of(7)
    model = mixture_graph(mixture, positive=False)
    lower_experts(model, operator=form == "rows")
    model.opset_imports.pop("topw.trace")
    signed = weights * np.array([1, -1], np.float32)
    np.testing.assert_allclose(run(model, hidden, ids, signed), literal(mixture, hidden, ids, signed), atol=FLOAT32)


def test_blocks_of_half_precision_are_near_the_literal_sum() -> None:
    """MoE in float16 returns zeros on a CPU, so it is not used."""
    mixture = random_mixture(biases=True)
    model = mixture_graph(mixture, positive=True, dtype=ir.DataType.FLOAT16)
    lower_experts(model, operator=True)
    model.opset_imports.pop("topw.trace")
    assert {node.domain for node in model.graph} == {""}
    inputs = inputs_of(9)
    wanted = literal(mixture, *inputs)
    np.testing.assert_allclose(run(model, *inputs), wanted, atol=HALF * np.abs(wanted).max())


def test_blocks_hold_at_most_two_copies_of_the_experts() -> None:
    mixture = random_mixture()
    model = lowered(mixture, "blocks")
    copies = [n.outputs[0] for n in model.graph if n.op_type == "Gather" and n.inputs[0].name == "experts.up"]  # type: ignore[union-attr]
    (copied,) = copies
    copied.shape = None
    model.graph.outputs.append(copied)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    for tokens, most in ((1, CHOSEN), (2, 2 * CHOSEN), (200, 2 * EXPERTS)):
        hidden, ids, weights = inputs_of(tokens)
        feeds = {"hidden": hidden, "ids": ids, "weights": weights}
        assert session.run([copied.name], feeds)[0].shape[0] <= most

"""The operator's inputs for masks and rules, in a graph whose only node it is, without the function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph

from tests.support.function_cases import Wanted, node_of, open_model, run
from tests.support.kernel import COLUMNS, Kernel
from tests.support.rows import columns, masks, packed, rules_of, some_edits
from tests.support.rule_rows import rule_case
from topw_deploy.sampling import TopWOptions
from topw_deploy.sampling.rules import RULES

OPTIONS = TopWOptions(metric="uniform", top_m=40)
VOCAB, ROWS = 301, 26


def node_model() -> onnx.ModelProto:
    model = Wanted(OPTIONS, VOCAB, mass=True, keep_mask=True).model()
    del model.functions[:]
    model.graph.input[-1].type.tensor_type.shape.dim[1].dim_param = "values"  # else the runtime checks it first
    return model


def inputs_of(rows: int, with_masks: bool = True) -> dict[str, np.ndarray]:
    """Rows of all rules in turn, with edits."""
    rng = np.random.default_rng(0)
    cases = [rule_case(rng, VOCAB, list(RULES)[row % len(RULES)]) for row in range(rows)]
    ids, penalty, bias = some_edits(rng, rows, VOCAB, 2)
    return {
        "logits": np.stack([case.logits for case in cases]),
        "edit_ids": ids,
        "edit_penalty": penalty,
        "edit_bias": bias,
        "allowed": packed(masks(rng, rows, VOCAB)) if with_masks else np.zeros((rows, 0), np.int32),
        **columns(cases),
        **dict(zip(("rule", "rule_values"), rules_of(cases), strict=True)),
    }


@pytest.fixture(scope="module")
def session(native_library: Path) -> ort.InferenceSession:
    return open_model(node_model(), native_library, threads=2)


@pytest.mark.parametrize("with_masks", [True, False])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_operator_answers_masked_rows_of_every_rule_as_the_library_does(
    native_library: Path, session: ort.InferenceSession, rows: int, with_masks: bool
) -> None:
    inputs = inputs_of(rows, with_masks)
    if rows > 5:
        inputs["rule"][5], inputs["rule_values"][2] = 12, 2.0  # invalid
    found = run(session, inputs)
    wanted = Kernel(native_library).sample(
        inputs["logits"], {name: inputs[name] for name in COLUMNS}, OPTIONS, None,
        (inputs["edit_ids"], inputs["edit_penalty"], inputs["edit_bias"]), allowed=inputs["allowed"],
        rules=(inputs["rule"], inputs["rule_values"]), mass=True, keep_mask=True,
    )  # fmt: skip
    for name, values in found.items():
        np.testing.assert_array_equal(values, getattr(wanted, name), err_msg=name)
    if rows > 5:
        assert {2, 5} <= set(np.flatnonzero(found["next_token"] < 0).tolist())
        assert with_masks or found["kept"].max() > OPTIONS.top_m  # plain sampling keeps more than the pool


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("allowed", (2, 1), "allowed has 1 words per row, but must have 0 or 10 for 301"),
        ("allowed", (2, 9), "allowed has 9 words per row"),
        ("allowed", (2, 11), "allowed has 11 words per row"),
        ("rule", (1,), "input 12"),
        ("rule_values", (1, 2), "input 13"),
        ("rule_values", (2, 1), "rule_values has 1 columns, but must have 2"),
        ("rule_values", (2, 3), "rule_values has 3 columns, but must have 2"),
    ],
)
def test_masks_and_rules_of_another_shape_are_refused(
    session: ort.InferenceSession, name: str, shape: tuple[int, ...], says: str
) -> None:
    inputs = inputs_of(2)
    with pytest.raises(InvalidArgument, match=says):
        run(session, inputs | {name: np.zeros(shape, inputs[name].dtype)})


def test_a_mask_of_another_type_or_a_node_without_the_rules_is_refused_when_the_session_opens(
    native_library: Path,
) -> None:
    model = node_model()
    (allowed,) = [value for value in model.graph.input if value.name == "allowed"]
    allowed.type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(InvalidGraph, match=r"int64.*\(allowed\)"):
        open_model(model, native_library)
    model = node_model()
    del node_of(model).input[-2:], model.graph.input[-2:]
    with pytest.raises((InvalidGraph, InvalidArgument, Fail), match=r"has (input size )?12 "):
        open_model(model, native_library)

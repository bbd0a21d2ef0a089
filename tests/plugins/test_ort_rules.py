"""The operator's inputs `rule` and `rule_values`, in a graph of the node alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph

from tests.support.function_cases import open_model, run
from tests.support.kernel import COLUMNS, Kernel
from tests.support.node_models import node_model
from topw_deploy.sampling import TopWOptions, TopWParameters

OPTIONS = TopWOptions(metric="uniform", top_m=40)
VOCAB, ROWS = 1021, 48


def inputs() -> dict[str, np.ndarray]:
    """Rows of all rules in turn, and two that are invalid."""
    rng = np.random.default_rng(0)
    columns = {name: np.full(ROWS, getattr(TopWParameters(), name, 0.0), np.float32) for name in COLUMNS}
    columns |= {"temperature": rng.uniform(0.3, 2.0, ROWS), "uniform": rng.random(ROWS) * 0.99}
    values = [
        (0, 0),
        (50, 0),
        (0.9, 0),
        (0.05, 0),
        (0.4, 100),
        (0.9, 0),
        (1e-3, 0),
        (2e-3, 0),
        (1, 0),
        (0, 0),
        (3, 0),
        (0, 0),
    ]
    made = {
        "logits": rng.standard_normal((ROWS, VOCAB)) * 3,
        "edit_penalty": np.full((ROWS, 1), 2.0),
        "edit_bias": np.full((ROWS, 1), 1.5),
        "rule_values": np.array([values[row % 12] for row in range(ROWS)]),
        **columns,
    }
    rules = (np.arange(ROWS) % 12).astype(np.int32)
    rules[5] = 12
    made["rule_values"][2] = 2.0
    return {name: value.astype(np.float32) for name, value in made.items()} | {
        "edit_ids": rng.integers(0, VOCAB, (ROWS, 1)),
        "allowed": np.zeros((ROWS, 0), np.int32),
        "rule": rules,
    }


@pytest.fixture(scope="module")
def session(native_library: Path) -> ort.InferenceSession:
    return open_model(node_model(OPTIONS), native_library, threads=2)


def test_the_operator_answers_every_rule_as_the_library_does(
    native_library: Path, session: ort.InferenceSession
) -> None:
    given = inputs()
    edits = (given["edit_ids"], given["edit_penalty"], given["edit_bias"])
    wanted = Kernel(native_library).sample(
        given["logits"], {name: given[name] for name in COLUMNS}, OPTIONS, edits=edits,
        rules=(given["rule"], given["rule_values"]), mass=True, keep_mask=True,
    )  # fmt: skip
    found = run(session, given)
    for name, values in found.items():
        np.testing.assert_array_equal(values, getattr(wanted, name), err_msg=name)
    assert np.flatnonzero(found["next_token"] < 0).tolist() == [2, 5]
    assert found["kept"].max() == VOCAB  # plain sampling keeps more than the pool


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("rule", (ROWS - 1,), "input 12"),
        ("rule_values", (ROWS - 1, 2), "input 13"),
        ("rule_values", (ROWS, 1), "rule_values has 1 columns, but must have 2"),
        ("rule_values", (ROWS, 3), "rule_values has 3 columns, but must have 2"),
    ],
)
def test_rules_of_another_shape_are_refused(
    session: ort.InferenceSession, name: str, shape: tuple[int, ...], says: str
) -> None:
    given = inputs()
    with pytest.raises(InvalidArgument, match=says):
        run(session, given | {name: np.zeros(shape, given[name].dtype)})


def test_a_node_without_the_rules_is_refused_when_the_session_opens(native_library: Path) -> None:
    old = node_model(OPTIONS, omitted=("rule", "rule_values"))
    with pytest.raises((InvalidGraph, InvalidArgument, Fail), match=r"has (input size )?12 "):
        open_model(old, native_library)

"""The operator's input `allowed`, in a graph of the node alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, InvalidGraph

from tests.support.function_cases import open_model, run
from tests.support.kernel import COLUMNS, Kernel
from tests.support.masks import masks, packed
from tests.support.native_cases import columns
from tests.support.node_models import no_rules, node_model
from tests.support.rows import random_case
from topw_deploy.sampling import TopWOptions

OPTIONS = TopWOptions(metric="uniform", top_m=40)
VOCAB, EDITS = 301, 2


def inputs_of(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs with edits and masks, and the unpacked masks."""
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, VOCAB) for _ in range(rows)]
    allowed = masks(rng, rows, VOCAB)
    named = {name: np.array(values, np.float32) for name, values in columns(cases).items()}
    return {
        "logits": np.stack([case.logits for case in cases]),
        "edit_ids": np.stack([rng.permutation(VOCAB)[:EDITS] for _ in cases]),
        "edit_penalty": rng.choice([0.5, 1.3], (rows, EDITS)).astype(np.float32),
        "edit_bias": rng.choice([-np.inf, 1.5], (rows, EDITS)).astype(np.float32),
        "allowed": packed(allowed),
        **{name: named[name] for name in COLUMNS},
        **no_rules(rows),
    }, allowed


@pytest.fixture(scope="module")
def session(native_library: Path) -> ort.InferenceSession:
    return open_model(node_model(OPTIONS), native_library, threads=2)


@pytest.mark.parametrize("rows", [1, 21])
def test_the_operator_answers_masked_rows_as_the_library_does(
    native_library: Path, session: ort.InferenceSession, rows: int
) -> None:
    inputs, _ = inputs_of(rows)
    edits = (inputs["edit_ids"], inputs["edit_penalty"], inputs["edit_bias"])
    found = run(session, inputs)
    wanted = Kernel(native_library).sample(
        inputs["logits"], {name: inputs[name] for name in COLUMNS}, OPTIONS, edits=edits, allowed=inputs["allowed"],
        mass=True, keep_mask=True,
    )  # fmt: skip
    for name, values in found.items():
        np.testing.assert_array_equal(values, getattr(wanted, name), err_msg=name)


@pytest.mark.parametrize("words", [1, 9, 11])
def test_a_mask_of_another_width_is_refused(session: ort.InferenceSession, words: int) -> None:
    inputs, _ = inputs_of(2)
    with pytest.raises(InvalidArgument, match=rf"allowed has {words} words per row, but must have 0 or 10 for 301"):
        run(session, inputs | {"allowed": np.full((2, words), -1, np.int32)})


def test_a_mask_of_another_type_is_refused_when_the_session_opens(native_library: Path) -> None:
    with pytest.raises(InvalidGraph, match=r"int64.*\(allowed\)"):
        open_model(node_model(OPTIONS, {"allowed": TensorProto.INT64}), native_library)

"""onnxruntime's native operator agrees with the model's function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.function_cases import NATIVE, Tally, Wanted, clear_rows, compare, feeds, graph, open_model, run
from tests.support.rows import Scenario, embedding_table, geometry_of, random_case
from tests.support.samples import slow
from topw_deploy.sampling import apply_edits, sample_row
from topw_deploy.sampling.parameters import METRICS, PARAMETER_NAMES, TopWOptions

SCENARIOS = [
    Scenario(TopWOptions(top_m=1200), 53, 8, "near-duplicates", 1),
    Scenario(TopWOptions(top_m=40, metric="unit", potential="knn"), 997, 16, "duplicates", 2),
    Scenario(TopWOptions(top_m=90, metric="cosine", alt_iters=9), 1000, 16, "clusters", 3),
    Scenario(TopWOptions(top_m=60, metric="uniform", alt_iters=1), 5000, 4, "plain", 4),
    Scenario(TopWOptions(top_m=7, metric="cosine", potential="knn", knn_k=2), 300, 5, "zeros", 5),
    Scenario(TopWOptions(top_m=1, metric="uniform"), 129, 4, "plain", 6),
    Scenario(TopWOptions(top_m=80, potential="knn", knn_k=100, alt_iters=2), 400, 12, "clusters", 7),
    Scenario(TopWOptions(metric="unit"), 1021, 32, "clusters", 8),
]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_crops_tokens_and_certificates_equal_the_reference_on_every_row(
    native_library: Path, scenario: Scenario
) -> None:
    embeddings = embedding_table(scenario)
    geometry = geometry_of(scenario.options, embeddings)
    sessions = {NATIVE: graph(scenario, NATIVE, embeddings, geometry)}
    rng = np.random.default_rng(scenario.seed)
    tallies = {NATIVE: Tally()}
    for _ in range(3):
        compare(scenario, sessions, geometry, [random_case(rng, scenario.vocab_size) for _ in range(50)], tallies)
    assert tallies[NATIVE].unexplained == []
    assert not tallies[NATIVE].explained  # double: no float32 ties
    assert sum(tallies[NATIVE].rows.values()) == 300


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize(("mass", "keep_mask"), [(False, False), (True, False), (False, True), (True, True)])
def test_every_set_of_outputs_is_recognised_and_equals_the_functions(
    native_library: Path, metric: Any, branches: bool, mass: bool, keep_mask: bool
) -> None:
    wanted = Wanted(TopWOptions(top_m=40, metric=metric), branches=branches, mass=mass, keep_mask=keep_mask)
    model = wanted.model()
    rng = np.random.default_rng(1)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(24)])
    function, native = run(open_model(model), inputs), run(open_model(model, native_library), inputs)
    assert list(native) == list(function)
    assert ("mass" in native, "keep_mask" in native) == (mass, keep_mask)
    same = clear_rows(wanted, inputs)
    assert same.sum() > 12
    for name, values in native.items():
        assert values.dtype == function[name].dtype, name
        assert values.shape == function[name].shape, name
        if name in ("logprob", "mass"):
            np.testing.assert_allclose(values[same], function[name][same], rtol=5e-4, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(values[same], function[name][same], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_tables_of_half_precision_are_read_as_they_are(native_library: Path, dtype: Any) -> None:
    wanted = Wanted(dtype=dtype, hidden_size=19, keep_mask=True)
    rng = np.random.default_rng(2)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(60)])
    found = run(open_model(wanted.model(), native_library), inputs)
    for index in np.flatnonzero(clear_rows(wanted, inputs)):
        parameters = {n: float(inputs[n][index]) for n in PARAMETER_NAMES}
        row = sample_row(
            inputs["logits"][index], parameters, wanted.options, wanted.geometry, float(inputs["uniform"][index])
        )
        np.testing.assert_array_equal(np.flatnonzero(found["keep_mask"][index]), np.sort(row.kept_ids))


@pytest.mark.parametrize("edits", [slow(1), 3, slow(17)])
def test_edits_change_the_logits_as_the_contract_says(native_library: Path, edits: int) -> None:
    wanted = Wanted(mass=True, keep_mask=True)
    rng = np.random.default_rng(edits)
    cases = [random_case(rng, wanted.vocab_size) for _ in range(40)]
    inputs = feeds(cases, edits)
    for row in range(40):
        inputs["edit_ids"][row] = rng.permutation(wanted.vocab_size + 5)[:edits] - 3  # some outside the vocabulary
    inputs["edit_penalty"] = rng.choice([0.5, 1.0, 1.3], (40, edits)).astype(np.float32)
    inputs["edit_bias"] = rng.choice([-np.inf, 0.0, 1.5, -2.0], (40, edits)).astype(np.float32)
    native = run(open_model(wanted.model(), native_library), inputs)
    edited = dict(inputs)
    edited["logits"] = np.stack([edited_row(inputs, row) for row in range(40)])
    plain = run(open_model(wanted.model(), native_library), edited | feeds(cases) | {"logits": edited["logits"]})
    for name, values in native.items():
        np.testing.assert_array_equal(values, plain[name], err_msg=name)
    clear = clear_rows(wanted, edited)
    function = run(open_model(wanted.model()), inputs)
    for name in ("next_token", "kept", "certified", "keep_mask"):
        np.testing.assert_array_equal(native[name][clear], function[name][clear], err_msg=name)


def edited_row(inputs: dict[str, np.ndarray], row: int) -> np.ndarray:
    """The row's logits after its valid edits."""
    ids = inputs["edit_ids"][row]
    real = (ids >= 0) & (ids < inputs["logits"].shape[1])
    return apply_edits(
        inputs["logits"][row], ids[real], inputs["edit_penalty"][row][real], inputs["edit_bias"][row][real]
    )


def test_an_invalid_row_answers_as_the_contract_says_and_leaves_the_others_alone(native_library: Path) -> None:
    wanted = Wanted(mass=True, keep_mask=True)
    rng = np.random.default_rng(3)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(4)])
    session = open_model(wanted.model(), native_library)
    clean = run(session, inputs)
    spoilt = {name: values.copy() for name, values in inputs.items()}
    spoilt["logits"][1, 7] = np.nan
    spoilt["uniform"][2] = 1.0
    found = run(session, spoilt)
    for row in (1, 2):
        assert (found["next_token"][row], found["kept"][row], found["certified"][row]) == (-1, 0, False)
        assert (found["logprob"][row], found["mass"][row], found["keep_mask"][row].any()) == (0, 0, False)
    for row in (0, 3):
        for name, values in clean.items():
            np.testing.assert_array_equal(found[name][row], values[row])


def test_many_rows_on_two_threads_equal_the_rows_alone(native_library: Path) -> None:
    wanted = Wanted(vocab_size=2000, mass=True, keep_mask=True)
    rng = np.random.default_rng(4)
    cases = [random_case(rng, wanted.vocab_size) for _ in range(64)]
    together = run(open_model(wanted.model(), native_library, threads=2), feeds(cases))
    session = open_model(wanted.model(), native_library, threads=1)
    for row, case in enumerate(cases):
        alone = run(session, feeds([case]))
        for name, values in together.items():
            np.testing.assert_array_equal(values[row], alone[name][0], err_msg=name)

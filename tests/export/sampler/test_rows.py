"""Rows are independent: invalid, greedy and edited ones, and those that need geometry beside those that do not."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from tests.support.function_cases import FORMS, feeds, graph, run
from tests.support.rows import Case, Scenario, embedding_table, random_case
from topw_deploy.sampling import Geometry, sample_row
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

SCENARIO = Scenario(TopWOptions(top_m=300), 2000, 8, "near-duplicates", 0)
VOCAB = SCENARIO.vocab_size
TABLES = {
    "whole": embedding_table(SCENARIO),
    "unreadable": np.zeros((1, 8), np.float32),  # only token 0 can be looked up
    "poisoned": np.full((VOCAB, 8), np.nan, np.float32),
}
GEOMETRY = Geometry.from_embeddings(TABLES["whole"], "mahalanobis")


@cache
def session(form: str, table: str = "whole") -> ort.InferenceSession:
    return graph(SCENARIO, form, TABLES[table], GEOMETRY)


def case(logits: np.ndarray, uniform: float = 0.5, **chosen: float) -> Case:
    parameters = {name: getattr(TopWParameters(), name) for name in TopWParameters.__slots__} | chosen
    return Case(logits.astype(np.float32), parameters, uniform, "test")


def random_rows(seed: int, count: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    return [random_case(rng, VOCAB) for _ in range(count)]


def normal(seed: int, **chosen: float) -> Case:
    return case(np.random.default_rng(seed).standard_normal(VOCAB), 0.4, **chosen)


def flat(seed: int) -> Case:
    """A certified row whose crop exceeds the candidates."""
    return normal(seed, temperature=2.0, init_top_p=1.0)


def short(seed: int) -> Case:
    """A row that the candidates prove."""
    return normal(seed, temperature=0.5)


def uncertified(seed: int) -> Case:
    return normal(seed, temperature=1.5, lam=0.3, init_top_p=0.2)


def broken(seed: int) -> Case:
    return normal(seed, temperature=-1.0)


def assert_row(found: dict[str, np.ndarray], index: int, wanted: Case) -> None:
    row = sample_row(wanted.logits, wanted.parameters, SCENARIO.options, GEOMETRY, wanted.uniform)
    assert int(found["next_token"][index]) == row.next_token
    assert int(found["kept"][index]) == row.kept
    assert bool(found["certified"][index]) == row.certified
    assert np.array_equal(np.flatnonzero(found["keep_mask"][index]), np.sort(row.kept_ids))


broken_logits = st.sampled_from([np.nan, np.inf, "all banned", "nan among banned"])
broken_parameters = st.sampled_from(
    [
        ("temperature", -0.5), ("temperature", np.nan), ("temperature", np.inf), ("selection_temperature", -1e-3),
        ("selection_temperature", np.nan), ("lam", -1.0), ("lam", np.inf), ("beta", np.nan), ("beta", -1e-6),
        ("init_top_p", 0.0), ("init_top_p", 1.001), ("init_top_p", np.nan), ("geom_scale", np.inf),
        ("geom_scale", np.nan), ("uniform", 1.0), ("uniform", -0.1), ("uniform", np.nan),
    ]
)  # fmt: skip


def spoil(row: Case, what: object, place: int) -> Case:
    logits, parameters, uniform = row.logits.copy(), dict(row.parameters), row.uniform
    if isinstance(what, tuple):
        name, value = what
        if name == "uniform":
            uniform = value
        else:
            parameters[name] = value
    elif isinstance(what, str):
        logits[:] = -np.inf
        if what == "nan among banned":
            logits[place] = np.nan
    else:
        logits[place] = what
    return Case(logits, parameters, uniform, "broken")


@pytest.mark.slow
@settings(max_examples=60)
@given(
    what=st.one_of(broken_logits, broken_parameters),
    place=st.integers(0, VOCAB - 1),
    seed=st.integers(0, 30),
    at=st.integers(0, 3),
    form=st.sampled_from(FORMS),
)
def test_an_invalid_row_is_marked_and_does_not_change_the_others(
    what: object, place: int, seed: int, at: int, form: str
) -> None:
    good = random_rows(seed, 4)
    batch = [*good[:at], spoil(good[at], what, place), *good[at + 1 :]]
    clean, found = run(session(form), feeds(good)), run(session(form), feeds(batch))
    assert int(found["next_token"][at]) == -1
    assert int(found["kept"][at]) == 0
    assert not found["certified"][at]
    assert float(found["logprob"][at]) == 0
    assert float(found["mass"][at]) == 0
    assert not found["keep_mask"][at].any()
    for index in set(range(4)) - {at}:
        for name, values in found.items():
            assert np.array_equal(values[index], clean[name][index]), name


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_alone_and_beside_rows_that_need_geometry(form: str) -> None:
    rows = [*random_rows(1, 60), flat(0), broken(0), short(0), uncertified(0)]
    together = run(session(form), feeds(rows))
    assert together["certified"][-4:].tolist() == [True, False, True, False]
    for index, row in enumerate(rows):
        alone = run(session(form), feeds([row]))
        for name, values in together.items():
            assert np.array_equal(values[index], alone[name][0]), (name, index)


@pytest.mark.parametrize(
    "batch",
    [[flat(0)], [flat(1), flat(2), flat(3)], [short(1), broken(0), flat(1)], [broken(1)], [short(2)]],
    ids=["flat", "all flat", "short, invalid and flat", "invalid", "short"],
)
def test_certified_and_invalid_rows_look_up_no_embedding(batch: list[Case]) -> None:
    found, wanted = (run(session("branches", table), feeds(batch)) for table in ("unreadable", "whole"))
    for name, values in found.items():
        assert np.array_equal(values, wanted[name]), name
    for index, row in enumerate(batch):
        if row.parameters["temperature"] > 0:
            assert found["certified"][index]
            assert_row(found, index, row)


@pytest.mark.parametrize("form", FORMS)
def test_an_uncertified_row_looks_up_embeddings_and_leaves_other_rows_alone(form: str) -> None:
    others = [flat(0), short(0), broken(0), flat(1)]
    batch = [uncertified(0), *others, uncertified(1)]
    with pytest.raises(InvalidArgument, match="out of"):
        run(session(form, "unreadable"), feeds(batch))
    alone = run(session(form), feeds(others))
    for table in ("whole", "poisoned"):
        beside = run(session(form, table), feeds(batch))
        for name, values in alone.items():
            assert np.array_equal(beside[name][1:-1], values), (name, table)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("penalty", [0.0, -1.0, np.nan])
def test_a_wrong_penalty_makes_its_row_invalid_unless_the_edit_is_padding(form: str, penalty: float) -> None:
    rows = random_rows(4, 2)
    inputs = feeds(rows, edits=2)
    inputs["edit_ids"][0] = [int(np.argmax(rows[0].logits)), -1]
    inputs["edit_penalty"][:] = penalty
    found = run(session(form), inputs)
    assert int(found["next_token"][0]) == -1
    assert_row(found, 1, rows[1])


@pytest.mark.parametrize("form", FORMS)
def test_huge_finite_logits_are_not_treated_as_infinite(form: str) -> None:
    logits = np.full(VOCAB, 3e38)
    logits[7] = 3.3e38
    row = case(logits)
    assert_row(run(session(form), feeds([row])), 0, row)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_with_padded_edits_and_without_any(form: str) -> None:
    scenario = Scenario(TopWOptions(top_m=30, metric="uniform"), 8192, 1, "plain", 0)
    opened = graph(scenario, form, np.zeros((8192, 1), np.float32), Geometry.uniform())
    rng = np.random.default_rng(9)
    rows = [random_case(rng, 8192) for _ in range(60)]
    rows[7].logits[8191] = np.nan
    rows[8].logits[3] = np.inf
    without, padded = run(opened, feeds(rows)), run(opened, feeds(rows, edits=3))
    assert without["next_token"][[7, 8]].tolist() == [-1, -1]
    assert (without["next_token"] >= 0).sum() == 58
    for name, values in without.items():
        assert np.array_equal(values, padded[name]), name

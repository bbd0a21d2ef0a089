"""Branches compute geometry only for a batch with an uncertified row."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from tests.support.function_cases import Case, Scenario, embedding_table, feeds, graph, run
from tests.support.samples import slow
from topw_deploy.sampling import Geometry, crop, sample_row
from topw_deploy.sampling.parameters import TopWOptions, TopWParameters

SCENARIO = Scenario(TopWOptions(top_m=300), 2000, 8, "plain", 0)
TABLES = {
    "whole": embedding_table(SCENARIO),
    "unreadable": np.zeros((1, 8), np.float32),  # only token 0 can be looked up
    "poisoned": np.full((2000, 8), np.nan, np.float32),
}


@cache
def session(form: str, table: str) -> ort.InferenceSession:
    geometry = Geometry.from_embeddings(TABLES["whole"], "mahalanobis")
    return graph(SCENARIO, form, TABLES[table], geometry)


def row(seed: int, uniform: float = 0.4, **chosen: float) -> Case:
    logits = np.random.default_rng(seed).standard_normal(2000).astype(np.float32)
    parameters = {name: getattr(TopWParameters(), name) for name in TopWParameters.__slots__} | chosen
    return Case(logits, parameters, uniform, "test")


def flat(seed: int) -> Case:
    """A certified row whose crop exceeds the candidates."""
    return row(seed, temperature=2.0, init_top_p=1.0)


def short(seed: int) -> Case:
    return row(seed, temperature=0.5)


def uncertified(seed: int) -> Case:
    return row(seed, temperature=1.5, lam=0.3, init_top_p=0.2)


def broken(seed: int) -> Case:
    return row(seed, temperature=-1.0)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_of_the_kind_that_their_names_say(seed: int) -> None:
    options = TopWOptions(top_m=300, metric="uniform")
    wide, narrow, other = (crop(case.logits, TopWParameters(**case.parameters), options)
                          for case in (flat(seed), short(seed), uncertified(seed)))  # fmt: skip
    assert (wide.certified, narrow.certified, other.certified) == (True, True, False)
    assert wide.base_size > 64 > narrow.base_size


@pytest.mark.parametrize(
    "batch",
    [
        [flat(0)],
        [flat(1), flat(2), flat(3)],
        [flat(0), short(0)],
        [short(1), broken(0), flat(1)],
        [broken(1)],
        [short(2)],
    ],
    ids=["flat", "all flat", "flat and short", "flat, short and invalid", "invalid", "short"],
)
def test_certified_and_invalid_rows_look_up_no_embedding(batch: list[Case]) -> None:
    found = run(session("branches", "unreadable"), feeds(batch))
    wanted = run(session("branches", "whole"), feeds(batch))
    for name, values in found.items():
        assert np.array_equal(values, wanted[name]), name
    geometry = Geometry.from_embeddings(TABLES["whole"], "mahalanobis")
    for index, case in enumerate(batch):
        if case.parameters["temperature"] < 0:
            assert (found["next_token"][index], found["certified"][index]) == (-1, False)
            continue
        answer = sample_row(case.logits, case.parameters, SCENARIO.options, geometry, case.uniform)
        assert found["certified"][index]
        assert int(found["next_token"][index]) == answer.next_token
        assert np.array_equal(np.flatnonzero(found["keep_mask"][index]), np.sort(answer.kept_ids))


@pytest.mark.parametrize("form", ["branches", slow("no-branches")])
def test_an_uncertified_row_looks_up_embeddings(form: str) -> None:
    with pytest.raises(InvalidArgument, match="out of"):
        run(session(form, "unreadable"), feeds([flat(0), uncertified(0)]))


@pytest.mark.parametrize("form", ["branches", slow("no-branches")])
def test_geometry_of_one_row_does_not_change_certified_and_invalid_rows(form: str) -> None:
    others = [flat(0), short(0), broken(0), flat(1)]
    alone = run(session(form, "whole"), feeds(others))
    for table in ("whole", "poisoned"):
        beside = run(session(form, table), feeds([uncertified(0), *others, uncertified(1)]))
        assert beside["certified"].tolist() == [False, True, True, False, True, False]
        for name, values in alone.items():
            assert np.array_equal(beside[name][1:-1], values), (name, table)

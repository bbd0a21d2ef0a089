"""The sampler-only folder gives the reference's draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs

from tests.support.toy_model import VOCAB, Toy, export_sampler
from topw_deploy.errors import GenerationError, ParameterError
from topw_deploy.manifest import Verification
from topw_deploy.runtime import TopWSampler
from topw_deploy.sampling import Geometry, TopWParameters, pack_mask, preset_parameters, sample_row, uniform_for

ROWS = 16
LOGITS = (np.random.default_rng(0).standard_normal((ROWS, VOCAB)) * 3).astype(np.float32)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory, sampler_choice: str) -> TopWSampler:
    folder = export_sampler(
        tmp_path_factory.mktemp("sampler") / "out", Toy.random(0), with_mass=True, with_keep_mask=True
    )
    return TopWSampler.from_pretrained(Path(folder), provider="cpu", sampler=sampler_choice)


def test_every_row_equals_the_reference(sampler: TopWSampler) -> None:
    temperatures = np.linspace(0, 3, ROWS, dtype=np.float32)
    uniform = np.random.default_rng(1).random(ROWS, np.float32)
    found = sampler.sample(LOGITS, uniform=uniform, temperature=temperatures, lam=0.4)
    for row in range(ROWS):
        parameters = TopWParameters(temperature=float(temperatures[row]), lam=0.4)
        want = sample_row(
            LOGITS[row], parameters, sampler.manifest.sampler.options, Geometry.uniform(), float(uniform[row])
        )
        assert found.next_token[row] == want.next_token
        assert found.kept[row] == want.kept
        assert found.certified[row] == want.certified
        assert found.keep_mask is not None
        assert set(np.flatnonzero(found.keep_mask[row])) == set(np.asarray(want.kept_ids).tolist())


def test_a_seed_and_a_position_give_the_published_draw(sampler: TopWSampler) -> None:
    positions = list(range(ROWS))
    by_seed = sampler.sample(LOGITS, seed=2**64 - 1, position=positions, temperature=2.0, lam=0.1)
    numbers = [uniform_for(2**64 - 1, p) for p in positions]
    by_hand = sampler.sample(LOGITS, uniform=numbers, temperature=2.0, lam=0.1)
    assert by_seed.next_token.tolist() == by_hand.next_token.tolist()


def test_a_preset_states_the_parameters_that_are_not_given(sampler: TopWSampler) -> None:
    found = sampler.sample(LOGITS, uniform=0.9, preset="lively", beta=3.0)
    expected = sampler.sample(LOGITS, uniform=0.9, **preset_parameters("lively", "uniform", None) | {"beta": 3.0})
    assert found.next_token.tolist() == expected.next_token.tolist()
    assert found.kept.tolist() == expected.kept.tolist()
    assert found.kept.tolist() != sampler.sample(LOGITS, uniform=0.9).kept.tolist()
    with pytest.raises(ParameterError, match="preset is 'wild', but must be one of paper, released, creative, lively"):
        sampler.sample(LOGITS, uniform=0.9, preset="wild")


def test_beta_may_depend_on_each_rows_temperature(sampler: TopWSampler) -> None:
    temperatures = np.linspace(0, 3, ROWS, dtype=np.float32)
    shared: dict[str, Any] = {"uniform": 0.5, "lam": 1.2, "init_top_p": 0.5}
    numbers = [1.5 + 0.5 * float(t) for t in temperatures]
    expected = sampler.sample(LOGITS, temperature=temperatures, beta=numbers, **shared)
    found = sampler.sample(LOGITS, temperature=temperatures, beta="1.5+0.5*T", **shared)
    mixed = sampler.sample(LOGITS, temperature=temperatures, beta=["1.5 + 0.5*T", *numbers[1:]], **shared)
    for each in (found, mixed):
        assert each.next_token.tolist() == expected.next_token.tolist()
        assert each.kept.tolist() == expected.kept.tolist()
    assert found.kept.tolist() != sampler.sample(LOGITS, temperature=temperatures, beta=1.5, **shared).kept.tolist()
    with pytest.raises(ParameterError, match=r"beta is '1.5\+T', but must be"):
        sampler.sample(LOGITS[:1], uniform=0.5, beta="1.5+T")
    with pytest.raises(ParameterError, match="beta has 17 values for 16 rows"):
        sampler.sample(LOGITS, uniform=0.5, beta=["1+1*T"] * (ROWS + 1))


def test_a_scale_may_be_per_median_distance_for_some_rows(tmp_path: Path) -> None:
    folder = export_sampler(tmp_path / "out", Toy.random(0), with_keep_mask=True)
    sampler = TopWSampler.from_pretrained(folder, provider="cpu")
    shared: dict[str, Any] = {"uniform": 0.5, "lam": 0.4, "init_top_p": 0.3, "geom_scale": 1.0}
    raw = sampler.sample(LOGITS, **shared).kept.tolist()
    assert sampler.sample(LOGITS, geom_unit="median", **shared).kept.tolist() == raw  # 1 under the uniform metric
    info = structs.replace(sampler.manifest.sampler, options=replace(sampler.manifest.sampler.options, metric="cosine"))
    sampler.manifest = structs.replace(sampler.manifest, sampler=info)
    with pytest.raises(ParameterError, match=r"this folder has no median distance.* export the sampler again with"):
        sampler.sample(LOGITS, geom_unit="median", **shared)
    measured = Verification(status="passed", median_distance=4.0)
    sampler.manifest = structs.replace(sampler.manifest, verification=measured)
    quarter = sampler.sample(LOGITS, **{**shared, "geom_scale": 0.25}).kept.tolist()
    assert quarter != raw
    assert sampler.sample(LOGITS, geom_unit="median", **shared).kept.tolist() == quarter
    units = ["median", None, "raw", *["median"] * (ROWS - 3)]
    mixed = sampler.sample(LOGITS, geom_unit=units, **shared).kept.tolist()
    assert mixed == [quarter[0], *raw[1:3], *quarter[3:]]
    for wrong, message in (({"geom_unit": "mean"}, "must be one of raw"), ({"geom_unit": ["raw"]}, "has 1 values for")):
        with pytest.raises(ParameterError, match=message):
            sampler.sample(LOGITS, **shared, **wrong)
    with pytest.raises(ParameterError, match="geom_scale is not given with it"):
        sampler.sample(LOGITS[:1], uniform=0.5, geom_unit="median")


def test_edits_are_applied_and_one_row_may_come_alone(sampler: TopWSampler) -> None:
    best = int(LOGITS[0].argmax())
    ids = np.array([[best, -1]])
    bias = np.array([[-np.inf, 5]], np.float32)
    found = sampler.sample(LOGITS[0], uniform=0.5, temperature=0.0, edit_ids=ids, edit_bias=bias)
    assert found.next_token.tolist() == [int(np.argsort(-LOGITS[0])[1])]
    assert found.kept.tolist() == [1]


def test_masked_rows_equal_the_reference_as_flags_and_as_words(sampler: TopWSampler) -> None:
    flags = np.random.default_rng(3).random((ROWS, VOCAB)) < 0.1
    flags[np.arange(ROWS), LOGITS.argmax(1)] = False
    flags[3] = True
    request: dict[str, Any] = {"uniform": 0.7, "temperature": 2.0, "lam": 0.2}
    found, plain = sampler.sample(LOGITS, allowed=flags, **request), sampler.sample(LOGITS, **request)
    words = pack_mask(flags)
    options, parameters = sampler.manifest.sampler.options, TopWParameters(temperature=2.0, lam=0.2)
    for row in range(ROWS):
        want = sample_row(LOGITS[row], parameters, options, Geometry.uniform(), 0.7, allowed=words[row])
        assert (found.next_token[row], found.kept[row]) == (want.next_token, want.kept)
    assert found.keep_mask is not None
    assert not (found.keep_mask & ~flags).any()
    assert found.next_token[3] == plain.next_token[3]
    assert (np.delete(found.next_token, 3) != np.delete(plain.next_token, 3)).all()
    packed = sampler.sample(LOGITS, allowed=words, **request)
    alone = sampler.sample(LOGITS[0], allowed=flags[0], **request)
    assert packed.next_token.tolist() == found.next_token.tolist()
    assert alone.next_token.tolist() == found.next_token[:1].tolist()


def test_a_row_without_an_allowed_token_is_named(sampler: TopWSampler) -> None:
    flags = np.ones((ROWS, VOCAB), np.bool_)
    flags[4] = False
    with pytest.raises(GenerationError, match=r"row 4 contain .* nothing finite after the edits and the mask"):
        sampler.sample(LOGITS, uniform=0.5, allowed=flags)


def test_an_invalid_row_is_named(sampler: TopWSampler) -> None:
    spoilt = LOGITS.copy()
    spoilt[[2, 5], 7] = np.nan
    with pytest.raises(GenerationError, match="row 2, 5 contain NaN"):
        sampler.sample(spoilt, uniform=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either uniform, or seed and position"),
        ({"seed": 1}, "give either uniform, or seed and position"),
        ({"uniform": 0.5, "seed": 1, "position": 1}, "give either uniform"),
        ({"uniform": 1.0}, r"must be in \[0, 1\)"),
        ({"uniform": [0.5] * 3}, r"must be one number, or an array \[16\]"),
        ({"seed": -1, "position": 0}, "seed is -1"),
        ({"seed": 1, "position": [0, 1]}, "position has 2 values for 16 rows"),
        ({"uniform": 0.5, "lamda": 1}, "did you mean lam"),
        ({"uniform": 0.5, "temperature": -1}, "temperature is -1"),
        ({"uniform": 0.5, "init_top_p": 0.0}, "init_top_p is 0"),
        ({"uniform": 0.5, "edit_ids": np.full((ROWS, 2), 4)}, "each at most once in a row"),
        ({"uniform": 0.5, "edit_ids": np.full((ROWS, 1), VOCAB)}, "below 259"),
        ({"uniform": 0.5, "edit_ids": np.zeros((2, 2), int)}, "edit_ids has the shape"),
        ({"uniform": 0.5, "edit_ids": np.ones((ROWS, 1), bool)}, "must be an array of integers"),
        ({"uniform": 0.5, "edit_ids": np.full((ROWS, 1), 1.7)}, "must be an array of integers"),
        ({"uniform": 0.5, "allowed": np.ones((ROWS, 9), np.int64)}, r"allowed is int64 \[16, 9\], but must be bool"),
        ({"uniform": 0.5, "allowed": np.ones((ROWS, 8), np.int32)}, r"or int32 \[16, 9\], a bit per token"),
        ({"uniform": 0.5, "allowed": np.ones(VOCAB, bool)}, r"allowed is bool \[1, 259\]"),
        ({"uniform": 0.5, "allowed": [[True], [True, False]]}, "allowed is object"),
        ({"seed": True, "position": 0}, "seed is True, but must be an integer"),
        (
            {"uniform": 0.5, **dict.fromkeys(("edit_ids", "edit_penalty"), np.zeros((ROWS, 1), int))},
            "edit_penalty must be",
        ),
    ],
)
def test_bad_arguments_are_parameter_errors(sampler: TopWSampler, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        sampler.sample(LOGITS, **settings)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, ml_dtypes.bfloat16])
def test_any_real_dtype_and_memory_order_draws_as_float32(sampler: TopWSampler, dtype: Any) -> None:
    logits = np.rint(LOGITS)
    want = sampler.sample(logits, uniform=0.3).next_token.tolist()
    assert sampler.sample(logits.astype(dtype), uniform=0.3).next_token.tolist() == want
    assert sampler.sample(np.asfortranarray(logits.astype(dtype)), uniform=0.3).next_token.tolist() == want
    assert sampler.sample(logits.tolist(), uniform=0.3).next_token.tolist() == want


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros(5, np.float32), r"logits have the shape \(1, 5\), but must be \[batch, 259\]"),
        (LOGITS[:0], r"logits have the shape \(0, 259\)"),
        ([], "logits have the shape"),
        ([[]], "logits have the shape"),
        (np.zeros((2, 0)), "logits have the shape"),
        (np.zeros((2, 2, VOCAB)), "logits have the shape"),
        (0.5, "logits have the shape"),
        ([[0.0] * VOCAB, [0.0]], "must be an array of real numbers"),
        (None, "must be an array of real numbers"),
        ("text", "must be an array of real numbers"),
        ([["1"] * VOCAB], "must be an array of real numbers"),
        (np.zeros((1, VOCAB), object), "must be an array of real numbers"),
        (np.zeros((1, VOCAB), complex), "must be an array of real numbers"),
        (np.zeros((1, VOCAB), "datetime64[s]"), "must be an array of real numbers"),
        (np.zeros((1, VOCAB), [("a", float)]), "must be an array of real numbers"),
        (np.ma.masked_array(LOGITS, LOGITS > 0), "masked array; fill it"),
    ],
)
def test_logits_that_are_not_a_matrix_of_numbers_are_a_parameter_error(
    sampler: TopWSampler, logits: Any, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        sampler.sample(logits, uniform=0.5)

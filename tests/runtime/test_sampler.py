"""The sampler-only folder: logits in, the reference's draws out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from topw_deploy.errors import GenerationError, ParameterError
from topw_deploy.runtime import TopWSampler
from topw_deploy.sampling import Geometry, TopWParameters, sample_row, uniform_for
from toy_model import VOCAB, Toy, export_sampler

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
    by_seed = sampler.sample(LOGITS, seed=2**64 - 1, position=positions, sample=3, temperature=2.0, lam=0.1)
    numbers = [uniform_for(2**64 - 1, p, 3) for p in positions]
    by_hand = sampler.sample(LOGITS, uniform=numbers, temperature=2.0, lam=0.1)
    assert by_seed.next_token.tolist() == by_hand.next_token.tolist()


def test_edits_are_applied_and_one_row_may_come_alone(sampler: TopWSampler) -> None:
    best = int(LOGITS[0].argmax())
    ids = np.array([[best, -1]])
    bias = np.array([[-np.inf, 5]], np.float32)
    found = sampler.sample(LOGITS[0], uniform=0.5, temperature=0.0, edit_ids=ids, edit_bias=bias)
    assert found.next_token.tolist() == [int(np.argsort(-LOGITS[0])[1])]
    assert found.kept.tolist() == [1]


def test_half_precision_logits_are_taken_as_float32(sampler: TopWSampler) -> None:
    half = LOGITS.astype(np.float16)
    assert (
        sampler.sample(half, uniform=0.3).next_token.tolist()
        == sampler.sample(half.astype(np.float32), uniform=0.3).next_token.tolist()
    )


def test_an_invalid_row_is_named(sampler: TopWSampler) -> None:
    spoilt = LOGITS.copy()
    spoilt[[2, 5], 7] = np.nan
    with pytest.raises(GenerationError, match="row 2, 5 hold NaN"):
        sampler.sample(spoilt, uniform=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give either uniform, or seed and position"),
        ({"seed": 1}, "give either uniform, or seed and position"),
        ({"uniform": 0.5, "seed": 1, "position": 1}, "give either uniform"),
        ({"uniform": 1.0}, r"must be in \[0, 1\)"),
        ({"uniform": [0.5] * 3}, "one for each of the 16 rows"),
        ({"seed": -1, "position": 0}, "seed is -1"),
        ({"seed": 1, "position": [0, 1]}, "position is"),
        ({"uniform": 0.5, "lamda": 1}, "did you mean lam"),
        ({"uniform": 0.5, "temperature": -1}, "temperature is -1"),
        ({"uniform": 0.5, "init_top_p": 0.0}, "init_top_p is 0"),
        ({"uniform": 0.5, "edit_ids": np.full((ROWS, 2), 4)}, "a token twice"),
        ({"uniform": 0.5, "edit_ids": np.full((ROWS, 1), VOCAB)}, "below 259"),
        ({"uniform": 0.5, "edit_ids": np.zeros((2, 2), int)}, "edit_ids has the shape"),
        ({"uniform": 0.5, "edit_ids": np.ones((ROWS, 1), bool)}, "edit_ids holds True, but must be -1"),
        ({"uniform": 0.5, "edit_ids": np.full((ROWS, 1), 1.7)}, "edit_ids holds 1.7, but must be -1"),
        ({"seed": True, "position": 0}, "seed is True, but must be an integer"),
        (
            {"uniform": 0.5, "edit_ids": np.ones((ROWS, 1), int), "edit_penalty": np.zeros((ROWS, 1))},
            "edit_penalty must be",
        ),
    ],
)
def test_bad_arguments_are_parameter_errors(sampler: TopWSampler, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        sampler.sample(LOGITS, **settings)


def test_logits_of_another_width_are_refused(sampler: TopWSampler) -> None:
    with pytest.raises(ParameterError, match=r"logits have the shape \(1, 5\), but must be \[batch, 259\]"):
        sampler.sample(np.zeros(5, np.float32), uniform=0.5)

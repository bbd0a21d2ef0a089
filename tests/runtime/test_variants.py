"""Requests whose `beta` depends on the temperature, or whose `geom_scale` is per median distance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.prepared import prepare
from tests.support.toy_model import EOS, Toy, export
from topw_deploy.engine import Engine
from topw_deploy.errors import ParameterError
from topw_deploy.manifest import MANIFEST_NAME
from topw_deploy.runtime import TopWModel
from topw_deploy.sampling import TopWOptions, TopWParameters

EXPORTED = TopWParameters(lam=1.5, temperature=0.9)
MEDIAN = 2.5


def rows(request: dict[str, Any], count: int = 1, **about: Any) -> list[TopWParameters]:
    about = {"exported": EXPORTED, "median_distance": MEDIAN, **about}
    return [sequence.params.top_w for sequence in prepare(request, [[5]] * count, **about)]


def beta(request: dict[str, Any], **about: Any) -> float:
    return rows(request, **about)[0].beta


def scale(request: dict[str, Any], **about: Any) -> float:
    return rows(request, **about)[0].geom_scale


# beta


@pytest.mark.parametrize(
    ("request_", "model", "expected"),
    [
        ({"beta": "1.5+1.5*T"}, {}, 1.5 + 1.5 * 0.9),  # the export's temperature
        ({"beta": " 1.5 + 1.5*T ", "temperature": 2}, {}, 4.5),
        ({"beta": "1.5+1.5*T"}, {"temperature": 2.0}, 4.5),
        ({"temperature": 2.0}, {"beta": "1.5+1.5*T"}, 4.5),
        ({"beta": 3.0, "temperature": 2.0}, {"beta": "1.5+1.5*T"}, 3.0),
        ({"beta": "1.5+1.5*T", "do_sample": False}, {}, 1.5),
        ({"beta": "1.5+1.5*T", "do_sample": True}, {"temperature": 0.0}, 3.0),
        ({"beta": "1.5+1.5*T", "selection_temperature": 1.0, "temperature": 2.0}, {}, 4.5),
        ({"generation_config": {"beta": "2*T"}, "temperature": 0.5}, {}, 1.0),
        ({"preset": "creative", "temperature": 1.5}, {}, 3.75),
        ({"preset": "creative"}, {"temperature": 0.5}, 3.0),  # a preset states its temperature, 1
    ],
)
def test_beta_is_its_number_at_the_temperature_that_the_row_ends_up_with(
    request_: dict[str, Any], model: dict[str, Any], expected: float
) -> None:
    assert beta(request_, file=model) == pytest.approx(expected, rel=1e-15)


def test_each_row_has_its_own_beta_and_temperature() -> None:
    request = {"beta": ["1.5+1.5*T", None, "2*T"], "temperature": [1.0, 2.0, 2.0]}
    assert [row.beta for row in rows(request, 3)] == [3.0, EXPORTED.beta, 4.0]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"beta": "1.5+T"}, r"beta is '1.5\+T', but must be a finite number >= 0, or A\+B\*T"),
        ({"beta": "1.5-2*T"}, r"beta is '1.5-2\*T', -0.3 at temperature 0.9, but must be"),
        ({"beta": "1e39"}, "beta is 1e\\+39, but must be a finite number.* in float32"),
        ({"lam": "1+1*T"}, "lam is '1\\+1\\*T', but must be a finite number"),
        ({"generation_config": {"beta": "T"}}, "generation_config: beta is 'T', but must be"),
    ],
)
def test_text_that_is_no_beta_is_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        rows(request_)


# geom_unit


@pytest.mark.parametrize(
    ("request_", "model", "expected"),
    [
        ({"geom_scale": 1.5, "geom_unit": "median"}, {}, 1.5 / MEDIAN),
        ({"geom_scale": 1.5, "geom_unit": "raw"}, {}, 1.5),
        ({}, {"geom_scale": 1.5, "geom_unit": "median"}, 1.5 / MEDIAN),
        ({"geom_scale": 1.5}, {"geom_scale": 2.0, "geom_unit": "median"}, 1.5),
        ({"generation_config": {"geom_scale": 1.5, "geom_unit": "median"}}, {"geom_scale": 2.0}, 1.5 / MEDIAN),
        ({"preset": "lively", "geom_scale": 1.5, "geom_unit": "median"}, {}, 1.5 / MEDIAN),
    ],
)
def test_a_unit_applies_to_the_scale_that_is_given_with_it(
    request_: dict[str, Any], model: dict[str, Any], expected: float
) -> None:
    assert scale(request_, file=model) == expected


def test_each_row_may_have_its_own_unit() -> None:
    found = rows({"geom_scale": [1.5, 1.5], "geom_unit": ["median", None]}, 2)
    assert [row.geom_scale for row in found] == [1.5 / MEDIAN, 1.5]


@pytest.mark.parametrize(
    ("request_", "median", "message"),
    [
        ({"geom_unit": "median"}, MEDIAN, "geom_unit is 'median', but geom_scale is not given with it"),
        ({"geom_scale": 1.5, "geom_unit": "median"}, None, "this export has no median distance of likely pairs"),
        ({"geom_scale": 1.5, "geom_unit": "mean"}, MEDIAN, "geom_unit is 'mean', but must be one of raw, median"),
        ({"geom_scale": 1e38, "geom_unit": "median"}, 0.01, r"geom_scale is 1e\+38, 1e\+40 when divided by"),
    ],
)
def test_a_unit_that_cannot_be_used_is_refused(request_: dict[str, Any], median: float | None, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        rows(request_, median_distance=median)


# Models and engines


def opened(folder: Path, metric: str, **manifest: Any) -> TopWModel:
    """A model over a toy's export with beta 3 by default and fields of its manifest replaced."""
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric=metric))
    out = export(folder, toy, form="scatter", defaults=TopWParameters(beta=3.0))
    data = json.loads((out / MANIFEST_NAME).read_text())
    data["verification"]["median_distance"] = manifest.pop("median_distance", None)
    data |= manifest
    (out / MANIFEST_NAME).write_text(json.dumps(data))
    return TopWModel.from_pretrained(out, provider="cpu", intra_op_num_threads=1)


WIDE: dict[str, Any] = {"lam": 0.5, "init_top_p": 0.3, "max_new_tokens": 12, "seed": 3, "eos_token_id": EOS}


def test_a_model_divides_the_scale_by_its_own_median_distance(tmp_path: Path) -> None:
    model = opened(tmp_path / "out", "mahalanobis", median_distance=MEDIAN)
    found = model.generate("abc", geom_scale=0.5, geom_unit="median", **WIDE)
    assert found.kept == model.generate("abc", geom_scale=0.5 / MEDIAN, **WIDE).kept
    assert found.kept != model.generate("abc", geom_scale=0.5, **WIDE).kept


def test_geom_unit_needs_a_median_distance_except_with_the_uniform_metric(tmp_path: Path) -> None:
    model = opened(tmp_path / "a", "mahalanobis")
    with pytest.raises(ParameterError, match="no median distance of likely pairs"):
        model.generate("abc", geom_scale=0.5, geom_unit="median")
    uniform = opened(tmp_path / "b", "uniform")
    found = uniform.generate("abc", geom_scale=0.5, geom_unit="median", **WIDE)
    assert found.token_ids == uniform.generate("abc", geom_scale=0.5, **WIDE).token_ids


@pytest.mark.parametrize("through", ["generate", "engine"])
def test_a_default_beta_of_the_manifest_follows_the_temperature(tmp_path: Path, through: str) -> None:
    model = opened(tmp_path / "out", "mahalanobis", default_beta="1.5+1.5*T")
    if through == "engine":
        with Engine(model) as engine:
            check_betas(lambda prompt, **given: engine.submit(prompt, **given).result(60))
    else:
        check_betas(model.generate)


def check_betas(generate: Callable[..., Any]) -> None:
    for temperature in (1.0, 2.0):
        given = {**WIDE, "lam": 1.5, "temperature": temperature}
        number = generate("abc", beta=1.5 + 1.5 * temperature, **given)
        assert generate("abc", **given).kept == number.kept
        assert generate("abc", beta="1.5+1.5*T", **given).token_ids == number.token_ids
    assert number.kept != generate("abc", beta=3.0, **given).kept

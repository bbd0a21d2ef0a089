"""`topw bench sampler`: reports, agreement, sides and logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from tests.support.samples import slow
from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.plugins.library import library_path
from topw_deploy.sampling import Geometry, TopWOptions, TopWParameters, as_float32, crop
from topw_deploy.sampling.parameters import METRICS
from topw_lab.bench.logits import bell_logits, likely_logits, make_logits
from topw_lab.bench.sampler import (
    REGIMES,
    compare_kept_sets,
    pool_neighbour_bound,
    read_logits,
    run,
    start,
    write_empty_model,
)

OURS = [*(["native"] if library_path() is not None else []), "graph", "torch"]
SMALL = ("--vocab", 300, "--hidden", 4, "--rounds", 2, "--peers", "graph,max")


def check(folder: Path, sides: list[str], regime: str, **options: Any) -> dict[str, Any]:
    """Compare two kept sets of a regime at T = 2 with the reference's."""
    parameters = asdict(as_float32({**REGIMES[regime][1], "temperature": 2.0}))
    np.save(folder / "logits-0.npy", make_logits(regime, 2000, 2, 0))
    has_bound = options["metric"] != "uniform"
    settings = {"folder": str(folder), "cases": [parameters], "options": options, "hidden": 8,
                "neighbour_bound": has_bound, "authors": None, "seed": 0, "threads": 1}  # fmt: skip
    agreement: dict[str, Any] = start(settings)["check"](case=0, sides=sides)
    return agreement


@pytest.mark.parametrize("metric", [name if name == METRICS[0] else slow(name) for name in METRICS])
@pytest.mark.parametrize("regime", [slow("certified"), "uncertified"])
def test_all_our_implementations_keep_the_same_set(metric: str, regime: str, tmp_path: Path) -> None:
    found = check(tmp_path, OURS, regime, metric=metric, top_m=150)
    assert set(found["sides"]) == set(OURS)
    assert all(side["same"] + side["ties"] == 2 for side in found["sides"].values())
    assert (found["certified"] == 2) == (regime == "certified")


# Agreement


def test_other_tokens_of_the_same_number_are_a_difference() -> None:
    row = likely_logits(100)[0]
    right = crop(row, TopWParameters(temperature=3.0), TopWOptions(metric="uniform"))
    wrong = np.isin(np.arange(100), right.kept[:-1])
    wrong[np.setdiff1d(np.arange(100), right.kept)[0]] = True
    with pytest.raises(BenchmarkError, match=r"graph keeps .* of sequence 0 where the reference keeps .* \(2 differ\)"):
        compare_kept_sets("graph", [wrong], [right], exact=True)
    assert compare_kept_sets("authors", [wrong], [right], exact=False) == (0, 0)


def test_a_difference_at_a_tie_is_counted_and_allowed() -> None:
    tied = crop(np.zeros(4, np.float32), TopWParameters(), TopWOptions(metric="uniform", top_m=2))
    assert tied.ties.pool_cut
    assert compare_kept_sets("graph", [[False, False, True, True]], [tied], exact=True) == (0, 1)


# Sides


@pytest.mark.parametrize(
    ("peers", "error", "message"),
    [
        (("genai-top-p",), BenchmarkError, "top-p 0.9 was requested, but is not installed: pip install onnxruntime-"),
        (("hf-top-p",), BenchmarkError, "transformers top-p 0.9, kept set only was requested, but is not installed: "),
        (("native",), BenchmarkError, "onnxruntime op was requested, but is not here: TOPW_NATIVE=0 disables it"),
        (("top-p",), ParameterError, "'top-p' is not a side of this benchmark; choose from native, "),
    ],
)
def test_a_side_that_is_named_must_be_there(
    peers: tuple[str, ...], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "is_importable", lambda module: module not in ("onnxruntime_genai", "transformers"))
    monkeypatch.setenv("TOPW_NATIVE", "0")
    with pytest.raises(error, match=message):
        run(vocab=50, hidden=4, peers=peers)


def test_the_model_for_genai_gives_logits_of_any_shape_and_counts_its_cache(tmp_path: Path) -> None:
    import onnxruntime as ort

    write_empty_model(tmp_path / "genai", 40, threads=1)
    session = ort.InferenceSession(tmp_path / "genai" / "model.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros((2, 1, 0, 1), np.float32)
    logits, key, _ = session.run(
        ["logits", "key_0", "value_0"],
        {"input_ids": np.ones((2, 3), np.int64), "attention_mask": np.ones((2, 3), np.int64),
         "past_key_0": empty, "past_value_0": empty},
    )  # fmt: skip
    assert logits.shape == (2, 3, 40)
    assert key.shape == (2, 1, 3, 1)
    assert json.loads((tmp_path / "genai" / "genai_config.json").read_text())["model"]["vocab_size"] == 40


# The command


@pytest.mark.slow
def test_the_command_reports_every_side_of_every_case(bench: Callable[..., Result], tmp_path: Path) -> None:
    done = bench("sampler", *SMALL, "--batch", 2, "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("| Top-W graph") == 2
    assert "2 sequences, 2 certified" in done.stdout
    assert "graph keeps the reference's set on 2" in done.stdout
    assert "Preparing logits" in done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert [case["parameters"]["temperature"] for case in document["runs"]] == [1, 2]
    for case in document["runs"]:
        assert list(case["sides"]) == ["graph", "max"]
        assert case["agreement"]["sides"]["graph"] == {"same": 2, "ties": 0}
        times, ours = (case["sides"][name] for name in ("max", "graph"))
        assert min(times["seconds"]) > 0
        assert times["ratio"]["median"] == pytest.approx(np.median(np.array(times["seconds"]) / ours["seconds"]))
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_with_quiet_and_json_to_stdout_nothing_else_is_printed(bench: Callable[..., Result], tmp_path: Path) -> None:
    np.save(tmp_path / "logits.npy", bell_logits(300)[0].astype(np.float16))
    done = bench("sampler", "--logits", tmp_path / "logits.npy", "--hidden", 4, "--rounds", 1, "--peers", "max",
                 "--quiet", "--json", "-", "--temperature", "0")  # fmt: skip
    assert done.stderr == ""
    (case,) = json.loads(done.stdout)["runs"]
    assert case["title"] == "certified, T = 0: 300 tokens, 1 sequence"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--regime", "hot"), "'hot' is not one of"),
        (("--temperature", "1,warm"), "'warm' is not a valid float"),
        (("--rounds", "0"), "0 is not in the range x>=1"),
        (("--threads", "99999"), "99999 is not in the range 1<=x<=1024"),
        (("--authors", "/no/such/file.py"), "does not exist"),
        (("--peers", ","), "the value is empty, but must list sides."),
    ],
)
def test_a_wrong_argument_is_a_usage_error(
    bench: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    done = bench("sampler", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "none/out.json"), "none is not a folder; choose another name"),
        (("--plot", "none/out.png"), "none is not a folder; choose another name"),
        (("--plot", "out.svg"), "must end in .png"),
        (("--temperature", "1e+300"), "is 1e+300, but must be"),
        (("--geom-scale", "-1e+39"), "is -1e+39, but must be"),
    ],
)
def test_what_cannot_be_written_or_held_is_refused_before_anything_is_timed(
    bench: Callable[..., Result], arguments: tuple[str, ...], message: str
) -> None:
    done = bench("sampler", *SMALL, *arguments)
    assert isinstance(done.exception, ParameterError)
    assert message in str(done.exception)
    assert done.stdout == done.stderr == ""


# Logits


@pytest.mark.parametrize("regime", REGIMES)
def test_the_rows_of_a_regime_are_certified_or_not_as_it_says(regime: str) -> None:
    temperatures, changes = REGIMES[regime]
    parameters = TopWParameters(temperature=temperatures[-1], **changes)
    logits = make_logits(regime, 32_000, 2, seed=3)
    assert logits.shape == (2, 32_000)
    assert logits.dtype == np.float32
    for row in logits:
        found = crop(row, parameters, TopWOptions(metric="uniform"))
        assert found.certified == (regime != "uncertified")
        assert (found.base_size > 64) == (regime != "certified")


@pytest.mark.parametrize(
    "array",
    [np.zeros((1, 2, 3)), np.zeros((2, 0)), np.array([0, np.nan]), np.full(2, -np.inf), np.array(["text"]), None],
)
def test_a_file_without_logits_is_refused(array: np.ndarray | None, tmp_path: Path) -> None:
    (tmp_path / "logits.npy").write_text("no array")
    if array is not None:
        np.save(tmp_path / "logits.npy", array)
    with pytest.raises(ParameterError, match=r"logits\.npy is not a \.npy file of logits"):
        read_logits(tmp_path / "logits.npy")


@pytest.mark.parametrize("metric", ["mahalanobis", "unit", "cosine"])
def test_the_pools_bound_is_below_every_distance_and_close_to_it(metric: str) -> None:
    rng = np.random.default_rng(5)
    table = rng.standard_normal((400, 6)).astype(np.float32)
    table[7] = table[9]  # duplicates have no distance
    geometry, logits = Geometry.from_embeddings(table, metric), likely_logits(400)
    bound = pool_neighbour_bound(geometry, [logits], top_m=50)
    distances = geometry.distances(np.arange(400), np.arange(400))
    np.fill_diagonal(distances, np.inf)
    assert (bound <= distances.min(axis=1)).all()
    inside = np.argsort(-logits[0])[:50]
    assert (bound[np.setdiff1d(np.arange(400), inside)] == 0).all()
    assert np.median(bound[inside] / distances.min(axis=1)[inside]) > 0.99

"""`topw bench sampler`: reports, agreement, sides and logits."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.samples import slow
from topw_deploy import install
from topw_deploy.errors import BenchmarkError, ParameterError
from topw_deploy.plugins.shared_library import library_path
from topw_deploy.sampling import METRICS, Geometry, TopWOptions, TopWParameters, crop
from topw_lab.bench.sampler import worker
from topw_lab.bench.sampler.genai_model import write_model
from topw_lab.bench.sampler.inputs import (
    REGIMES,
    Case,
    bell_logits,
    likely_logits,
    make_logits,
    pool_neighbour_bound,
    read_logits,
)
from topw_lab.bench.sampler.request import GENAI_SEARCHES, GROUPS, SIDES, SamplerBenchRequest, choose
from topw_lab.bench.sampler.run import run
from topw_lab.bench.sampler.torch_samplers import TorchSampler
from topw_lab.bench.sampler.worker import agreement_sentence, compare_kept_ids
from topw_lab.bench.sides import select

NATIVE = ("native",) if library_path() is not None else ()
OURS = (*NATIVE, "graph", "graph-ort", "torch")


def settings_for(asked: SamplerBenchRequest, folder: Path, **changes: Any) -> dict[str, Any]:
    sent = {"vocab": asked.vocab, "hidden": asked.hidden, "batch": asked.batch, "seed": 0, "threads": 1,
            "regimes": ["certified"], "temperatures": [1.0], "geom_scale": 1.0, "logits": None, "authors": None,
            "neighbour_bound": False, "options": {}, "sides": ["torch"], "folder": str(folder)}  # fmt: skip
    return {**sent, **changes}


# The report


def test_a_report_has_every_side_of_every_case(small_request: SamplerBenchRequest) -> None:
    report = run(small_request)
    assert [found.case["label"] for found in report.cases] == ["certified, T = 1", "certified, T = 2"]
    for found in report.cases:
        assert list(found.samples) == ["torch", "max"]
        assert all(len(times) == 2 and min(times) > 0 for times in found.samples.values())
    text = report.text()
    assert "| Top-W torch" in text
    assert "2 rows, 2 certified" in text
    assert "the reference's set on every row: torch" in text


@pytest.mark.slow
def test_a_report_is_plain_json_with_all_samples_and_the_machine(small_request: SamplerBenchRequest) -> None:
    document = json.loads(json.dumps(run(small_request).as_dict()))
    assert document["benchmark"] == "sampler"
    assert document["machine"]["cores"] >= 1
    assert "numpy" in document["machine"]["versions"]
    assert document["settings"]["vocab"] == 500
    side = document["cases"][1]["sides"]["max"]
    assert len(side["seconds"]) == 2
    assert side["ratio_to_ours"]["median"] == pytest.approx(
        np.median(np.array(side["seconds"]) / document["cases"][1]["sides"]["torch"]["seconds"])
    )
    assert document["cases"][0]["agreement"]["sides"]["torch"] == {"rows": 2, "same": 2, "ties": 0}


@pytest.mark.parametrize("metric", [name if name == METRICS[0] else slow(name) for name in METRICS])
@pytest.mark.parametrize("regime", [slow("certified"), "uncertified"])
def test_all_our_implementations_keep_the_same_set(metric: str, regime: str, tmp_path: Path) -> None:
    sent = settings_for(
        SamplerBenchRequest(vocab=2000, hidden=8, batch=2), tmp_path, sides=list(OURS), regimes=[regime],
        options={"metric": metric, "top_m": 150}, temperatures=[2.0], neighbour_bound=metric != "uniform",
    )  # fmt: skip
    found = worker.start(sent)["check"](case=0)
    assert set(found["sides"]) == set(OURS)
    assert all(side["same"] + side["ties"] == 2 for side in found["sides"].values())
    assert (found["certified"] == 2) == (regime == "certified")


# Agreement


def test_a_wrong_implementation_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = TorchSampler.kept_ids
    monkeypatch.setattr(TorchSampler, "kept_ids", lambda *given: [ids[:-1] for ids in right(*given) or ()])
    check = worker.start(
        settings_for(SamplerBenchRequest(vocab=2000, hidden=8), tmp_path, regimes=["flat"], temperatures=[2.0])
    )
    with pytest.raises(BenchmarkError, match=r"torch keeps \d+ tokens of row 0 where the reference keeps \d+ \(1 diff"):
        check["check"](case=0)


def test_other_tokens_of_the_same_number_are_a_difference() -> None:
    row = likely_logits(100)[0]
    right = crop(row, TopWParameters(temperature=3.0), TopWOptions(metric="uniform"))
    wrong = np.append(right.kept[:-1], np.setdiff1d(np.arange(100), right.kept)[0])
    with pytest.raises(BenchmarkError, match=r"\(2 differ\)"):
        compare_kept_ids("torch", [wrong], [right], exact=True)
    assert compare_kept_ids("authors", [wrong], [right], exact=False).same == 0


def test_a_difference_at_a_tie_is_counted_and_allowed() -> None:
    logits = np.zeros(4, np.float32)
    tied = crop(logits, TopWParameters(), TopWOptions(metric="uniform", top_m=2))
    assert tied.ties.pool_cut
    found = compare_kept_ids("graph", [[2, 3]], [tied], exact=True)
    assert (found.same, found.ties) == (0, 1)
    assert "graph on 0 of 1, 1 differ at a tie" in agreement_sentence([found], [tied])


# Sides


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "onnxruntime_genai", "transformers")
    present, absent = choose(SamplerBenchRequest())
    assert not any(side.name.startswith(("genai", "hf")) for side in present)
    reasons = {side.label: side.why_not for side in absent}
    assert str(reasons["onnxruntime-genai greedy"]).startswith("not installed: pip install onnxruntime-genai")
    assert reasons["transformers top-k 50"] == f"not installed: {install.install_command('export')}"


def test_a_peer_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "onnxruntime_genai")
    with pytest.raises(
        BenchmarkError, match=r"^genai-greedy was requested, but is not installed: pip install [^.]+\.$"
    ):
        choose(SamplerBenchRequest(peers=("genai-greedy",)))
    with pytest.raises(BenchmarkError, match="authors was requested, but is without its file: give --authors"):
        choose(SamplerBenchRequest(peers=("authors",)))


def test_without_the_native_library_the_native_sides_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPW_NATIVE", "0")
    present, absent = choose(SamplerBenchRequest())
    assert "native" not in {side.name for side in present}
    assert {side.label: side.why_not for side in absent}[
        "Top-W native, onnxruntime op"
    ] == "not here: TOPW_NATIVE=0 disables it"


def test_more_threads_than_any_machine_has_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"threads are \[99999\], but must be integers in \[1, 1024\]"):
        SamplerBenchRequest(threads=99_999)


@pytest.mark.slow
def test_a_greedy_row_is_timed_like_any_other(small_request: SamplerBenchRequest) -> None:
    (found,) = run(replace(small_request, temperatures=(0.0,))).cases
    assert "torch" in found.samples


def test_names_and_groups_select_sides_in_the_order_of_the_table() -> None:
    sides = list(SIDES.values())
    found = select(sides, ["max", "hf", "torch"], GROUPS)
    assert [side.name for side in found] == ["torch", "hf-top-p", "hf-top-k", "hf-min-p", "max"]
    with pytest.raises(ParameterError, match="'top-p' is not a side of this benchmark; choose from native, "):
        select(sides, ["top-p"], GROUPS)


def test_every_side_of_genai_has_its_search_options() -> None:
    assert set(GENAI_SEARCHES) == {name for name in SIDES if name.startswith("genai-")}
    assert all("top_k" in options for options in GENAI_SEARCHES.values() if options["do_sample"])


def test_the_model_for_genai_gives_logits_of_any_shape_and_counts_its_cache(tmp_path: Path) -> None:
    import onnxruntime as ort

    folder = write_model(tmp_path / "genai", 40, threads=1)
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros((2, 1, 0, 1), np.float32)
    logits, key, _ = session.run(
        ["logits", "present.0.key", "present.0.value"],
        {"input_ids": np.ones((2, 3), np.int64), "attention_mask": np.ones((2, 3), np.int64),
         "past_key_values.0.key": empty, "past_key_values.0.value": empty},
    )  # fmt: skip
    assert logits.shape == (2, 3, 40)
    assert key.shape == (2, 1, 3, 1)
    assert json.loads((folder / "genai_config.json").read_text())["model"]["vocab_size"] == 40


# Logits


@pytest.mark.parametrize("regime", REGIMES)
def test_the_rows_of_a_regime_are_certified_or_not_as_it_says(regime: str) -> None:
    temperatures, changes = REGIMES[regime]
    case = Case(regime, TopWParameters(temperature=temperatures[-1], **changes))
    logits = make_logits(case, 32_000, 2, seed=3)
    assert logits.shape == (2, 32_000)
    assert logits.dtype == np.float32
    for row in logits:
        found = crop(row, case.parameters, TopWOptions(metric="uniform"))
        assert found.certified == (regime != "uncertified")
        assert (found.base_size > 64) == (regime != "certified")


@pytest.mark.slow
def test_logits_come_from_a_file_if_one_is_given(tmp_path: Path) -> None:
    np.save(tmp_path / "row.npy", bell_logits(300)[0].astype(np.float16))
    asked = SamplerBenchRequest(logits=tmp_path / "row.npy", hidden=4, rounds=1, peers=("torch", "max"))
    (first, _) = run(asked).cases
    assert (first.case["vocab"], first.case["batch"]) == (300, 1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((1, 2, 3), np.float32), "must be floating point, [V] or [B, V]"),
        (np.zeros(3, np.int64), "holds int64 [3]"),
        (np.zeros((2, 0), np.float32), "must be floating point"),
        (np.array([0, np.nan], np.float32), "has NaN, +infinity or a row without a finite logit"),
        (np.full(2, -np.inf, np.float32), "has NaN, +infinity or a row without a finite logit"),
    ],
)
def test_a_file_without_logits_is_refused(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", array)
    with pytest.raises(ParameterError) as error:
        read_logits(tmp_path / "rows.npy")
    assert message in str(error.value)


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.npy").write_text("rows")
    with pytest.raises(ParameterError, match=r"cannot be read as a \.npy file"):
        read_logits(tmp_path / "rows.npy")


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


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name in modules else find(name, *rest),
    )

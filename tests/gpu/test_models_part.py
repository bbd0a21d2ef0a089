"""The part `models` on the CPU: steps, absences and wrong tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import models
from benchmarks.gpu.job import Job, Result
from benchmarks.gpu.models import Way
from tests.support.toy_model import Toy, export
from topw_deploy.errors import BenchmarkError
from topw_deploy.sampling import TopWOptions

pytestmark = pytest.mark.long


def answers(job: Job) -> dict[str, Result]:
    return {step.name: step.run(job) for step in models.steps(job)}


def test_every_way_to_run_a_folder_is_a_step_and_draws_the_recorded_tokens(job: Job) -> None:
    found = answers(job)
    assert list(found) == [
        "toy, cpu",
        "toy, cuda",
        "toy, cuda, the file's function",
        "toy, cuda, captured",
        "toy, cuda, captured, two threads",
    ]
    for name, result in found.items():
        assert (result.failed, result.absent) == ("", ()), name
        assert (result.data["sequences"], result.data["equal"], result.data["first_difference"]) == (32, 32, None)
        assert len(result.data["ms_per_token"]["this"]) == len(result.data["ms_per_token"]["cpu"]) == 2
    assert found["toy, cuda, the file's function"].data["sampler"] == "graph"
    assert "onnxruntime" in found["toy, cuda"].data["onnxruntime"]


def test_a_step_is_repeated_when_the_folder_or_its_tokens_change(job: Job, exported: Path, tmp_path: Path) -> None:
    def inputs() -> tuple[str, ...]:
        return models.steps(job)[0].inputs

    before = inputs()
    assert inputs() == before
    beside = models.tokens_file(exported)
    kept = beside.read_text(encoding="utf-8")
    beside.write_text(kept + "\n", encoding="utf-8")
    changed = inputs()
    beside.write_text(kept, encoding="utf-8")
    assert changed != before == inputs()


def test_without_an_onnxruntime_for_cuda_the_step_names_what_to_bring(job: Job) -> None:
    job.rehearse = False
    (cuda,) = [step for step in models.steps(job) if step.name == "toy, cuda"]
    result = cuda.run(job)
    assert (result.data, result.table, result.failed) == ({}, "", "")
    (sentence,) = result.absent
    assert "is for CPUs: no model was run on CUDA; bring pack-onnxruntime.tar.xz" in sentence


def test_another_sampler_than_the_one_to_measure_fails(job: Job, exported: Path) -> None:
    result = models.run_way(exported, Way({"provider": "cpu", "sampler": "graph"}, "native"), job)
    assert result.failed.startswith("native should choose the tokens, but graph does: ")


def test_the_tokens_of_another_model_fail(job: Job, exported: Path, tmp_path: Path) -> None:
    known = json.loads(models.tokens_file(exported).read_text(encoding="utf-8"))
    other = export(
        tmp_path / "other", Toy.random(2, options=TopWOptions(top_m=64, metric="mahalanobis")), form="scatter",
        max_length=128,
    )  # fmt: skip
    models.tokens_file(other).write_text(json.dumps(known), encoding="utf-8")
    result = models.run_way(other, Way({"provider": "cpu"}), job)
    assert "within 4 steps, more than 25%: rounding does not explain that" in result.failed
    assert result.data["first_difference"] == 0


def test_a_difference_is_counted_from_its_first_step() -> None:
    found = models.compare_tokens([[1, 2, 3], [1, 2, 3], [1, 2], [7]], [[1, 2, 3], [1, 5, 6], [1, 2, 3], [8]])
    assert (found.equal, found.steps) == (1, (1, 2, 0))
    with pytest.raises(BenchmarkError, match="2 sequences were drawn, but 1 are recorded"):
        models.compare_tokens([[1], [2]], [[1]])


@pytest.mark.parametrize(
    ("steps", "float32", "fails"),
    [
        ((), True, False),
        ((5,) * 4, True, False),
        ((5,) * 6, True, True),  # float32: more than 5 % differ, late
        ((5,) * 60, False, False),  # half precision and 4 bits: rounding, late
        ((1,) * 25, False, False),
        ((1,) * 26, False, True),
    ],
)
def test_rounding_is_distinguished_from_a_wrong_model(steps: tuple[int, ...], float32: bool, fails: bool) -> None:
    assert bool(models.why_not_rounding(models.Difference(100, steps), float32)) == fails

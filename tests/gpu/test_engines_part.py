"""The part `engines` over doubles of TensorRT and CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import engines, models
from benchmarks.gpu.job import Job, Step, StepError
from tests.support.tensorrt_double import TensorRT, gpu, trt  # noqa: F401  # fixtures
from topw_deploy.plugins import library


def steps(job: Job) -> dict[str, Step]:
    return {step.name: step for step in engines.steps(job)}


@pytest.fixture
def found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the TensorRT double look importable."""
    monkeypatch.setattr(engines, "find_spec", lambda name: name if name == "tensorrt" else None)
    monkeypatch.setattr(models, "find_spec", lambda name: None)  # it has no file


@pytest.mark.usefixtures("found_here")
@pytest.mark.slow
def test_an_engine_is_built_in_a_copy_and_draws_the_recorded_tokens(
    job: Job, exported: Path, trt: TensorRT  # noqa: F811
) -> None:  # fmt: skip
    every = steps(job)
    assert list(every) == [
        "toy, plugin, build",
        "toy, plugin, tokens",
        "toy, the file's function, build",
        "toy, the file's function, tokens",
    ]
    built = every["toy, plugin, build"].run(job)
    assert built.failed == ""
    assert built.data["bytes"] > 0
    drawn = every["toy, plugin, tokens"].run(job)
    assert (drawn.failed, drawn.data["equal"], drawn.data["sampler"]) == ("", 32, "plugin")
    assert not (exported / "engines").exists()


@pytest.mark.usefixtures("found_here", "trt")
def test_tokens_without_a_build_name_what_is_missing(job: Job) -> None:
    with pytest.raises(StepError, match="the step before this one builds it"):
        steps(job)["toy, plugin, tokens"].run(job)


@pytest.mark.usefixtures("found_here")
def test_a_refused_build_fails_with_its_message(job: Job, trt: TensorRT) -> None:  # noqa: F811
    trt.refuses = "no such operator"
    assert "no such operator" in steps(job)["toy, plugin, build"].run(job).failed


@pytest.mark.parametrize("has_tensorrt", [False, True])
def test_a_step_that_cannot_run_names_what_is_missing(
    job: Job, monkeypatch: pytest.MonkeyPatch, has_tensorrt: bool
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: name if has_tensorrt else None)
    monkeypatch.setattr(library, "query_driver", lambda: library.Driver(None, (), "there is no NVIDIA driver"))
    (step,) = engines.steps(job)
    absent = "no engine is built in a rehearsal without a GPU: there is no NVIDIA driver"
    assert (absent if has_tensorrt else "bring pack-tensorrt.tar.xz") in step.run(job).absent[0]

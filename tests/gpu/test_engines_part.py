"""The part `engines` over doubles of TensorRT and CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import engines, models
from benchmarks.gpu.job import Job, Step, StepError
from tests.support.tensorrt_double import TensorRT, gpu, trt  # noqa: F401  # fixtures
from tests.support.toy_model import Toy, export
from topw_deploy.plugins import library
from topw_deploy.sampling import TopWOptions


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toy = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))
    folder = export(tmp_path_factory.mktemp("packed") / "toy", toy, form="scatter", max_length=128)
    models.record_tokens(folder, models.requests(seeds=1, tokens=12))
    return folder


@pytest.fixture
def job(tmp_path: Path, exported: Path) -> Job:
    library = tmp_path / "libtopw_cuda.so"
    library.touch()
    return Job(tmp_path / "out", library, rehearse=True, folders=[str(exported)], rounds=2)


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


def test_without_tensorrt_the_step_names_what_to_bring(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    (step,) = engines.steps(job)
    assert "bring pack-tensorrt.tar.xz" in step.run(job).absent[0]


@pytest.mark.usefixtures("found_here")
def test_a_rehearsal_without_a_gpu_reports_that_no_engine_is_built(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "query_driver", lambda: library.Driver(None, (), "there is no NVIDIA driver"))
    (step,) = engines.steps(job)
    expected = "no engine is built in a rehearsal without a GPU: there is no NVIDIA driver"
    assert step.run(job).absent == (expected,)

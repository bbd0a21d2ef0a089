"""`topw build-engine` with NVIDIA's parser and builder; engines are not run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import export

from .conftest import run_worker

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "out"
    export("tiny", folder, target="tensorrt", max_length=128)
    return folder


@pytest.fixture(scope="session")
def answers(demo: Path, tmp_path_factory: pytest.TempPathFactory, plugin: Path) -> dict[str, dict[str, Any]]:
    """By name, from one process."""
    folder = tmp_path_factory.mktemp("engines")
    asked: dict[str, dict[str, Any]] = {
        "both": {"max_batch": 4, "max_sequence": 32, "timing_cache": str(folder / "timings"), "workspace": 1 << 28},
        "decode": {"profile": "decode", "max_edits": 8},
        "no room": {"workspace": 1},
        "plugin": {"plugin": str(plugin), "max_batch": 4, "max_sequence": 32},
    }
    requests = [{"out": str(folder / name), "plugin": "none", **request} for name, request in asked.items()]
    for name in asked:
        shutil.copytree(demo, folder / name)
    return dict(zip(asked, run_worker("engine_worker.py", folder, requests), strict=True))


@pytest.mark.parametrize(("name", "profiles"), [("both", 2), ("decode", 1), ("plugin", 2)])
def test_the_demo_becomes_an_engine_with_a_stamp_that_fits(
    answers: dict[str, dict[str, Any]], name: str, profiles: int
) -> None:
    found = answers[name]
    assert "error" not in found, found
    assert len(found["stamp"]["profiles"]) == profiles
    assert bool(found["stamp"]["plugin"]) == (name == "plugin")
    assert found["stamp"]["size"] == Path(found["path"]).stat().st_size > 15_000_000  # weights alone
    assert sum(found["shown"]) == 100  # NVIDIA's phases and steps end with ours
    assert len(found["shown"]) > 10


def test_a_mapped_file_is_taken_and_only_the_driver_is_missing(answers: dict[str, dict[str, Any]]) -> None:
    assert "CUDA driver version is insufficient" in answers["both"]["opened"]


def test_timings_are_written_as_tensorrt_gives_them(answers: dict[str, dict[str, Any]]) -> None:
    assert (Path(answers["both"]["path"]).parents[2] / "timings").stat().st_size > 0


def test_what_this_tensorrt_cannot_do_is_one_sentence(answers: dict[str, dict[str, Any]]) -> None:
    error = answers["no room"]["error"]
    assert error.startswith("TensorRTError: TensorRT 11.4.0.106 could not build an engine (")
    assert error.endswith("; give smaller bounds or a larger --workspace.")
    assert "OutOfMemory" in error

"""The GPU command, rehearsed on a CPU with a GPU host's packages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.cuda import tools

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def command(host: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Without this project's environment, network or packages."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "CUDA_HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [str(host), "-m", "benchmarks.gpu", *options], cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, errors="replace",
    )  # fmt: skip


@pytest.fixture(scope="module")
def rehearsed(
    host: Path, packed_demo: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The command over a packed model, and its results folder."""
    out = tmp_path_factory.mktemp("rehearsal")
    home = tools.home()
    with pytest.MonkeyPatch.context() as patch:
        if home is not None:
            patch.setenv("CUDA_HOME", str(home))
        return out, command(host, "--rehearse", "--out", str(out), "--pack", *map(str, packed_demo))


def steps(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())["steps"]
    return found


def test_every_step_of_every_part_passes(rehearsed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = rehearsed
    assert done.returncode == 0, done.stderr[-5000:]
    assert {key: entry["state"] for key, entry in steps(out).items() if entry["state"] not in ("done", "absent")} == {}
    done_parts = {key.split("/")[0] for key, entry in steps(out).items() if entry["state"] == "done"}
    assert done_parts >= {"build", "check", "sanitize", "capture", "speed", "models"}
    assert steps(out)["build/resources"]["data"]["kernels"]["geometry"]["registers"] > 0  # compiled by nvcc
    assert "there are no models exported for TensorRT" in (out / "results.md").read_text()


def test_every_figure_is_marked_as_a_rehearsals(rehearsed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = rehearsed
    assert "REHEARSAL" in json.loads((out / "results.json").read_text())["rehearsal"]
    tables = (out / "results.md").read_text()
    for section in tables.split("\n## ")[1:]:
        assert "(REHEARSAL)" in section.splitlines()[0]
    assert "REHEARSAL" in done.stdout
    assert "REHEARSAL" in done.stderr


def test_the_same_command_again_repeats_no_finished_step(
    host: Path, rehearsed: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    out = rehearsed[0]
    before = {key: entry["when"] for key, entry in steps(out).items() if entry["state"] == "done"}
    done = command(host, "--rehearse", "--out", str(out), "--only", "check", "capture")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {key: steps(out)[key]["when"] for key in before} == before


def test_without_a_gpu_the_command_runs_nothing_and_reports_it(host: Path, tmp_path: Path) -> None:
    done = command(host, "--out", str(tmp_path))
    assert done.returncode == 1
    assert "NOTHING WAS RUN: there is no CUDA GPU here" in done.stderr
    assert done.stdout == ""

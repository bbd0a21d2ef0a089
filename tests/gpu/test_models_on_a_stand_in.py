"""The part `models` on onnxruntime's CUDA provider over a stand-in for CUDA's runtime.

Every way opens, captures and is timed; wrong tokens (the stand-in computes nothing) are detected.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import tokens
from tests.cuda_provider.conftest import cuda_library, python, stand_in  # noqa: F401  # fixtures

from .packed_demo import demo_folder, packed_demo  # noqa: F401  # fixtures

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
from benchmarks.gpu import models, ways
from benchmarks.gpu.job import Job
ways._TIMED_TOKENS, ways._WARMUP = 4, 0  # the kernels are emulated
job = Job(Path(sys.argv[1]), Path(sys.argv[2]), folders=[sys.argv[3]], rounds=1)
answers = {step.name: step.run(job) for step in models.steps(job)}
print(json.dumps({name: [answer.failed, answer.absent, answer.data] for name, answer in answers.items()}))
"""


@pytest.fixture(scope="module")
def answers(
    python: Path, stand_in: Path, cuda_library: Path, demo_folder: Path, tmp_path_factory: pytest.TempPathFactory  # noqa: F811
) -> dict[str, tuple[str, list[str], dict[str, Any]]]:  # fmt: skip
    """(failed, absent, data) by step."""
    out = tmp_path_factory.mktemp("out")
    folder = Path(shutil.copytree(demo_folder, out / demo_folder.name))
    tokens.record_tokens(folder, [{**request, "max_new_tokens": 6} for request in tokens.requests()[3:6]])
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": str(stand_in),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "ORT_ENABLE_XQA": "0",  # queries device code, which the stand-in lacks
    }
    done = subprocess.run(
        [str(python), "-c", SCRIPT, str(out), str(cuda_library), str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_cpu_draws_the_recorded_tokens(answers: dict[str, Any]) -> None:
    failed, absent, data = answers["float16-gqa, cpu"]
    assert (failed, absent) == ("", [])
    assert (data["provider"], data["equal"], data["sequences"]) == ("CPUExecutionProvider", 6, 6)


@pytest.mark.parametrize("way", ["cuda", "cuda, captured", "cuda, captured, two threads"])
def test_a_way_on_cuda_opens_is_timed_and_its_wrong_tokens_fail(answers: dict[str, Any], way: str) -> None:
    failed, absent, data = answers[f"float16-gqa, {way}"]
    assert "6 of 6 sequences differ from the CPU's within 4 steps" in failed
    assert absent == []
    assert (data["provider"], data["sampler"], data["equal"]) == ("CUDAExecutionProvider", "native", 0)
    assert [len(times) for times in data["ms_per_token"].values()] == [1, 1]


def test_a_way_that_fails_to_open_is_recorded_with_the_error(answers: dict[str, Any]) -> None:
    failed, _, data = answers["float16-gqa, cuda, the file's function"]
    assert "cuDNN is unavailable" in failed  # for the function's reductions; the stand-in lacks it
    assert data == {}

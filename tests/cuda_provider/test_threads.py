"""Models with CUDA graphs in many threads. During a capture, the stand-in refuses the calls that CUDA refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import export, write_checkpoint

from .conftest import Run

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    checkpoint = write_checkpoint(root / "checkpoint", "llama_untied")
    export(checkpoint, root / "out", dtype="fp16", target="tensorrt", max_length=64)
    return root / "out"


def test_a_step_is_captured_once_whichever_thread_calls(run: Run, folder: Path) -> None:
    """Without RunThread, the provider would capture again in every thread."""
    found = run("threads_worker.py", folder, "in turn")
    assert found["errors"] == []
    assert (found["captures"], found["replays"]) == (1, 6 * 5)


def test_models_capture_while_others_run(run: Run, folder: Path) -> None:
    """Without the lock of the device, this fails with CUDA's error 900."""
    found = run("threads_worker.py", folder, "at once")
    assert found["errors"] == []
    assert found["mistakes"] == 0
    assert found["captures"] >= 8

"""Models with CUDA graphs in many threads. During a capture, the stand-in refuses the calls that CUDA refuses."""

from __future__ import annotations

import pytest

from .conftest import Folder, Run

pytestmark = pytest.mark.long

SETTINGS = {"dtype": "fp16", "target": "tensorrt", "max_length": 64}


def test_a_step_is_captured_once_whichever_thread_calls(run: Run, folder: Folder) -> None:
    """Without RunThread, the provider would capture again in every thread."""
    found = run("threads_worker.py", folder("llama_untied", **SETTINGS), "in turn")
    assert found["errors"] == []
    assert (found["captures"], found["replays"]) == (1, 6 * 5)


def test_models_capture_while_others_run(run: Run, folder: Folder) -> None:
    """Without the lock of the device, this fails with CUDA's error 900."""
    found = run("threads_worker.py", folder("llama_untied", **SETTINGS), "at once")
    assert found["errors"] == []
    assert found["mistakes"] == 0
    assert found["captures"] >= 8

"""The end of the process, forks, and signal handlers."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.engine.conftest import HOT, Gate, NewEngine
from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG
from topw_deploy.errors import GenerationError
from topw_deploy.runtime import TopWModel

EXIT = """
import sys
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel
model = TopWModel.from_pretrained(sys.argv[1], provider="cpu", intra_op_num_threads=1)
engine = Engine(model, max_batch=4)
for seed in range(200):
    request = engine.submit("a", max_new_tokens=90, temperature=2.5, ignore_eos=True)
next(iter(request))
for seed in range(200):
    engine.submit("a", max_new_tokens=90, temperature=2.5, ignore_eos=True)
if sys.argv[2] == "forgotten":
    del engine
sys.exit(3)
"""


@pytest.mark.long
@pytest.mark.parametrize("kept", ["kept", "forgotten"])
def test_the_process_ends_while_requests_run(toy: Toy, tmp_path: Path, kept: str) -> None:
    """An interpreter that ends while a thread is inside onnxruntime usually aborts, but not always: so three runs."""
    folder = export(tmp_path / "out", toy, form="grouped")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", EXIT, str(folder), kept],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_is_refused_at_once(model: TopWModel, engine_of: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    running = engine.submit("a", max_new_tokens=3, stopping_criteria=(gate := Gate()))
    with monkeypatch.context() as patch:  # as in a child, without its missing threads
        patch.setattr(os, "getpid", lambda: -7)
        save = functools.partial(engine.save_session, "a", "session")
        for call in (lambda: engine.submit("a"), engine.drain, running.result, lambda: list(running), save):
            with pytest.raises(GenerationError, match=r"was called in process -7, a fork of .* with 'spawn'"):
                call()
        engine.shutdown()  # has nothing to end
    gate.opened.set()
    assert len(running.result(60).token_ids) == 3


def test_a_cancellation_may_happen_during_another(model: TopWModel, engine_of: NewEngine, gate: Gate) -> None:
    """Garbage collection does so when it ends generators. The test cancels at each call inside `cancel`."""
    engine = engine_of(model)
    request = engine.submit("a", max_new_tokens=50, stopping_criteria=gate, **HOT)
    depth = [0, 0]

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and depth[0] < 40:
            depth[0] += 1
            sys.setprofile(interrupt)  # allows calls in calls
            request._cancel(request)

    def call() -> None:
        sys.setprofile(interrupt)
        try:
            request.cancel()
        finally:
            sys.setprofile(None)
        depth[1] = 1

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG)
    assert depth[0]
    assert depth[1], "the calls waited for each other"
    gate.opened.set()
    assert request.result(60).finish_reason == "cancelled"

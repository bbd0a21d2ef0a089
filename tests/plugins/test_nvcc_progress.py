"""Compilation progress from nvcc --verbose and ptxas's files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from topw_deploy.plugins import compile_native, nvcc
from topw_deploy.plugins.nvcc import CompilationState

NVCC = """#!/bin/sh
echo '#$ cicc --display_error_number -arch compute_80 "a.ii"'
echo '#$ ptxas -arch=sm_80 -m64  "80.ptx"  -o "{folder}/80.cubin"  > /tmp/x_stdout 2>/tmp/x_stderr'
echo '#$ "/opt/bin/ptxas" -arch=sm_90 -m64  "90.ptx"  -o "{folder}/90.cubin"'
while [ ! -e {folder}/seen ]; do sleep 0.02; done
echo code > {folder}/90.cubin
while [ ! -e {folder}/seen90 ]; do sleep 0.02; done
echo code > {folder}/80.cubin
echo "launch.cu(7): warning: odd"
{end}
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that waits for files `seen` and `seen90`."""
    monkeypatch.setattr(nvcc, "_INTERVAL", 0.02)
    path = tmp_path / "nvcc"
    path.write_text(NVCC.format(folder=tmp_path, end="exit 0"))
    path.chmod(0o755)
    return path


def states(script: Path) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The reported states without repetitions."""
    reported: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def watch(state: CompilationState) -> None:
        assert state.seconds >= 0
        reported.append((state.running, state.done, state.total))
        if state.running == (80, 90):
            (script.parent / "seen").touch()
        if state.done:
            (script.parent / "seen90").touch()

    nvcc.run_nvcc([str(script)], 2, watch)
    return list(dict.fromkeys(reported))


def test_an_architecture_runs_from_its_ptxas_to_its_file(script: Path) -> None:
    reported = states(script)
    assert ((80, 90), (), 2) in reported
    assert ((80,), (90,), 2) in reported
    assert reported[-1] == ((), (90, 80), 2)


def test_a_failure_quotes_nvccs_error_and_none_of_its_commands(script: Path) -> None:
    script.write_text(NVCC.format(folder=script.parent, end='echo "launch.cu(9): error: no such word"; exit 2'))
    with pytest.raises(compile_native.NotBuiltError, match=r"nvcc failed \(launch.cu\(9\): error: no such word\)$"):
        states(script)
    with pytest.raises(compile_native.NotBuiltError, match=r"nowhere cannot be run"):
        nvcc.run_nvcc(["/nowhere"], 1, nvcc.ignore_state)


def test_an_exception_of_the_watcher_also_ends_the_compilers_that_nvcc_started(script: Path) -> None:
    """They keep nvcc's output open, and the reader waits for its end."""
    started = script.parent / "started"
    script.write_text(f"#!/bin/sh\nsleep 600 &\ntouch {started}\nwait\n")
    ended: list[bool] = []

    def watch(state: CompilationState) -> None:
        if started.exists():
            raise KeyboardInterrupt

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            nvcc.run_nvcc([str(script)], 1, watch)
        ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert ended

"""Processes killed at any moment: what they wrote is the old state or the new one, and the next run succeeds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.kill_writers import WRITERS
from tests.engine.test_session_file import FORM, TOKENS, states_of
from tests.support.samples import broad
from topw_deploy.engine.session_file import read_session, write_session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits the size of files")


def run_worker(name: str, *arguments: object) -> dict[str, Any]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", f"tests.attacks.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


EXPORTS = [name for name in WRITERS if name.startswith("export")]
OTHERS = [name for name in WRITERS if name not in EXPORTS]


def check_kills(name: str, model: Path, folder: Path, share: int, least: int) -> None:
    found = run_worker("kill_writers", name, model, folder, share)
    assert not found["wrong"], "\n".join(found["wrong"])
    assert found["operations"] >= least


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("share", [30, broad(1)])
def test_an_export_killed_before_any_file_operation(foreign: Path, tmp_path: Path, name: str, share: int) -> None:
    check_kills(name, foreign, tmp_path, share, 30)


@pytest.mark.broad
def test_an_export_of_a_checkpoint_killed_before_any_file_operation(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    check_kills("export-replace", checkpoint("llama_tied"), tmp_path, 7, 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("share", [12, broad(1)])
def test_what_a_command_writes_is_old_or_new_when_it_is_killed_before_any_file_operation(
    whole: Path, tmp_path: Path, name: str, share: int
) -> None:
    check_kills(name, whole, tmp_path, share, 2)


KILLED = """
import os, resource, signal, sys
from tests.attacks.kill_writers import WRITERS
from tests.engine.test_session_file import FORM, TOKENS, states_of, write_session
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process at the limit
for size in map(int, sys.argv[2:]):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        write_session(sys.argv[1], FORM, TOKENS, states_of(5, 1))
        os._exit(0)
    print(size, os.waitpid(child, 0)[1], flush=True)
    for name in os.listdir(os.path.dirname(sys.argv[1])):
        if name != "session":
            assert name.startswith(".session-"), name
            os.unlink(os.path.join(os.path.dirname(sys.argv[1]), name))
    print(open(sys.argv[1], "rb").read().hex(), flush=True)
"""


@pytest.mark.parametrize("step", [pytest.param(97, marks=pytest.mark.slow), broad(1)])
def test_a_session_killed_after_any_number_of_bytes_leaves_the_old_file(tmp_path: Path, step: int) -> None:
    """Before the rename at fsync and at the rename: tests/engine/test_session_file.py."""
    path = tmp_path / "session"
    size = write_session(path, FORM, TOKENS, states_of(5)).bytes
    before = path.read_bytes()
    sizes = [*range(0, size, step), size - 1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(path), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.split("\n")
    for number, limit in enumerate(sizes):
        assert lines[2 * number] == f"{limit} {signal.SIGXFSZ.value}"
        assert lines[2 * number + 1] == before.hex()
    assert read_session(path, FORM)[0].tolist() == TOKENS.tolist()
    write_session(path, FORM, TOKENS, states_of(5, 1))  # as the next try does
    assert path.read_bytes() != before


@pytest.mark.long
@pytest.mark.parametrize("moments", [("streaming",), ("loading", "reading", "draining")], ids="-".join)
def test_a_server_killed_under_load_leaves_nothing_and_starts_again(
    whole: Path, tmp_path: Path, moments: tuple[str, ...]
) -> None:
    """At a port, and at a Unix socket, which each server leaves and the next one replaces."""
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    with tempfile.TemporaryDirectory(prefix="topw") as place:  # short: a socket's path has at most 107 characters
        address = "0" if moments == ("streaming",) else str(Path(place) / "s")
        found = run_worker("kill_server", whole, tmp_path, address, *moments)
        assert os.listdir(place) == [], "the last server was not killed"
    assert not found["wrong"], "\n".join(found["wrong"])
    assert found["left"] == []
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before
    assert list(found["moments"]) == list(moments)
    for moment, seen in found["moments"].items():
        assert seen["cut"] + seen["refused"].get("draining", 0) == found["clients"], (moment, seen)
        assert seen["whole"] == 0 or moment in ("streaming", "draining"), (moment, seen)
        assert (seen["begun"] > 0) == (moment in ("streaming", "draining")), (moment, seen)
        assert seen["refused"].keys() <= {moment}, (moment, seen)

"""Processes killed at any moment: what they wrote is the old state or the new one, and the next run succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.kill_writers import CASES
from tests.support.samples import broad

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits the size of files")


def run_worker(name: str, *arguments: object) -> dict[str, Any]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", f"tests.attacks.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


EXPORTS = [name for name in CASES if name.startswith("export")]
OTHERS = [name for name in CASES if name not in EXPORTS]


def check_kills(name: str, model: Path, folder: Path, share: int, least: int) -> None:
    found = run_worker("kill_writers", name, model, folder, share)
    assert not found["wrong"], "\n".join(found["wrong"])
    assert found["operations"] >= least


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("share", [30, broad(1)])
def test_an_export_killed_before_any_file_operation(foreign: Path, tmp_path: Path, name: str, share: int) -> None:
    check_kills(name, foreign, tmp_path, share, 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("share", [12, broad(1)])
def test_what_a_command_writes_is_old_or_new_when_it_is_killed_before_any_file_operation(
    whole: Path, tmp_path: Path, name: str, share: int
) -> None:
    check_kills(name, whole, tmp_path, share, 2)


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

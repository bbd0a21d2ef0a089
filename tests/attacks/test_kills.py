"""Processes killed at any moment: what they wrote is the old state or the new one, and the next run succeeds.

Servers: tests/serve/test_server.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks.kill_writers import CASES
from tests.support.samples import broad

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits the size of files")
EXPORTS = [name for name in CASES if name.startswith("export")]


def check_kills(name: str, model: Path, folder: Path, share: int, least: int) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "tests.attacks.kill_writers", name, str(model), str(folder), str(share)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], "\n".join(found["wrong"])
    assert found["operations"] >= least


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("share", [60, broad(1)])
def test_an_export_killed_before_any_file_operation(foreign: Path, tmp_path: Path, name: str, share: int) -> None:
    check_kills(name, foreign, tmp_path, share, 30)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in EXPORTS])
@pytest.mark.parametrize("share", [12, broad(1)])
def test_what_a_command_writes_is_old_or_new_when_it_is_killed_before_any_file_operation(
    whole: Path, tmp_path: Path, name: str, share: int
) -> None:
    check_kills(name, whole, tmp_path, share, 2)

"""onnxruntime sends and stores no telemetry unless requested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "statement",
    [
        "import topw_deploy.runtime",
        "from topw_deploy.cli.main import run, topw; assert run(topw, 'topw', 'TOPW', ['doctor']) == 0",
    ],
)
def test_onnxruntime_leaves_no_file_in_the_temporary_folder(tmp_path: Path, statement: str) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", statement], env=environment, check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_telemetry_that_the_user_wants_stays_on() -> None:
    code = "import os, topw_deploy; assert os.environ['ORT_DISABLE_TELEMETRY'] == '0'"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "ORT_DISABLE_TELEMETRY": "0"}, check=True)

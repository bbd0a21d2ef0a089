"""Runs scripts in Node, which may drive a headless Chromium: `make browser` installs both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.shared import skip_or_fail

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".browser"


def needs_browser() -> None:
    """Skip the test where Node or the browser is not installed. In CI, which installs both, it fails."""
    if reason := _missing():
        skip_or_fail(reason)


def run_node(script: Path, *arguments: str, timeout: float = 300) -> Any:
    """Run a script with Node and return the last line that it prints, read as JSON.

    The script finds the packages of `.browser/` by its variable TOPW_BROWSER, as tests/browser/open_browser.mjs does.
    """
    needs_browser()
    done = subprocess.run(
        ["node", str(script), *arguments],
        env={**os.environ, "TOPW_BROWSER": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def _missing() -> str | None:
    if not (FOLDER / "ready.stamp").exists():
        return "no browser: run `make browser`"
    if (FOLDER / "unavailable").exists():
        return "no browser: npm's packages could not be installed"
    return None if shutil.which("node") else "Node is not installed"

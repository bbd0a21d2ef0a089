"""Without Node's packages or the browser, their tests are skipped on a machine of one's own and fail in CI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import browser

ROOT = Path(__file__).parents[2]


@pytest.fixture
def failing(tmp_path: Path) -> str:
    """A PATH whose first npm fails."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\nexit 1\n")
    npm.chmod(0o755)
    return f"{npm.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("ci", ["true", ""])
def test_make_browser_fails_in_ci_if_npm_does(failing: str, tmp_path: Path, ci: str) -> None:
    stamp = tmp_path / "browser" / "ready.stamp"
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", f"BROWSER={stamp.parent}", str(stamp)],
        cwd=ROOT,
        env={**outer, "PATH": failing, "CI": ci},
        capture_output=True,
        text=True,
    )
    done = (made.returncode == 0, stamp.exists(), (stamp.parent / "unavailable").exists())
    assert done == ((False,) * 3 if ci else (True,) * 3), made.stderr


@pytest.mark.parametrize("found", [[], ["ready.stamp", "unavailable"]], ids=["not made", "npm failed"])
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_tests_without_a_browser_fail_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[str], ci: str, outcome: type[BaseException]
) -> None:
    for name in found:
        (tmp_path / name).touch()
    monkeypatch.setattr(browser, "FOLDER", tmp_path)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="no browser"):
        browser.needs_browser()

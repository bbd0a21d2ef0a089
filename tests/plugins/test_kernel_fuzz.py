"""The native sampler under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fuzz import native as fuzz

pytestmark = pytest.mark.long

SECONDS = 4


def test_random_bytes_give_valid_answers_and_touch_no_foreign_memory(tmp_path: Path) -> None:
    """All inputs random; `python -m fuzz.native` is the long run."""
    program = tmp_path / "native_rows"
    try:
        fuzz.build(program, "c++", libfuzzer=False)
    except (fuzz.NotBuiltError, OSError) as reason:
        pytest.skip(f"no compiler with sanitizers: {reason}")
    done = subprocess.run([program, str(SECONDS), "1"], capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-4000:]
    executions = re.search(r"(\d+) executions", done.stdout)
    assert executions is not None
    assert int(executions[1]) > 0

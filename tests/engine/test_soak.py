"""The engine's soak test (`make soak`) for a minute, and tests of its search for leaks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fuzz.engine.flatness import ALLOWED, Sample, growth, leaks

ROOT = Path(__file__).parents[2]


def samples(count: int, noise: float = 0.0, **slopes: float) -> list[Sample]:
    """Samples of a process after every 500 requests. Its memory grows by 20 MB during the first quarter, and then by
    `slopes` per request.
    """
    rng, found = np.random.default_rng(0), []
    for number in range(1, count + 1):
        warm = min(1.0, 4 * number / count)
        one = Sample(500 * number, int(1e8 + 2e7 * warm + noise * rng.random()), 30_000_000, 400_000, 6, 3)
        grown = {name: getattr(one, name) + int(slope * one.requests) for name, slope in slopes.items()}
        found.append(replace(one, **grown))
    return found


@pytest.mark.parametrize("name", ALLOWED)
def test_the_growth_of_a_process_is_found(name: str) -> None:
    slope = {"objects": 1.0}.get(name, 1024.0)
    assert leaks(samples(30, noise=1e6)) == []
    (found,) = leaks(samples(30, noise=1e6, **{name: slope}))
    assert found.startswith(f"{name} grew by ")
    assert growth(samples(5), name) is None


@pytest.mark.parametrize("name", ["handles", "threads"])
def test_a_handle_or_thread_that_is_not_closed_is_found(name: str) -> None:
    found = samples(9)
    found[-1] = replace(found[-1], **{name: getattr(found[0], name) + 1})
    (complaint,) = leaks(found)
    assert complaint.startswith(f"{name} grew from")


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fuzz.engine", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_nothing_is_lost_mixed_stuck_or_leaked_in_a_minute() -> None:
    done = soak("--seconds", "60", "--replay", "1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.broad
def test_the_soak_finds_a_leak_of_one_kilobyte_per_request() -> None:
    done = soak("--seconds", "60", "--replay", "0", "--leak", "1024")
    assert done.returncode == 1
    assert "allocated grew by" in done.stdout

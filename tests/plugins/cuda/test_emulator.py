"""The emulator detects missing barriers, divergence and excessive shared memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.cuda_kernel import built, compiled

THREADS = 128


@pytest.fixture(scope="module")
def probes(request: pytest.FixtureRequest, emulated_library: Path) -> ctypes.CDLL:
    assert request.config.cache is not None
    path = compiled(request.config.cache.mkdir("emulated"), [Path(__file__).with_name("probes.cu")])
    library = ctypes.CDLL(str(path))
    library.probe_error.restype = ctypes.c_char_p
    library.probe_settings.argtypes = (ctypes.c_uint64, ctypes.c_uint32)
    library.probe_settings(1, 4)
    return library


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def error(probes: ctypes.CDLL) -> str:
    return bytes(probes.probe_error()).decode()


def reversals(probes: ctypes.CDLL, with_barrier: bool) -> list[list[int]]:
    found = []
    for seed in range(1, 9):
        probes.probe_settings(seed, 4)
        out = np.zeros(THREADS, np.int32)
        assert probes.probe_reverse(THREADS, address(out), int(with_barrier)) == 0
        found.append(out.tolist())
    return found


@pytest.mark.slow
def test_a_missing_barrier_shows_as_answers_that_change_with_the_seed(probes: ctypes.CDLL) -> None:
    right = list(range(THREADS))[::-1]
    assert all(answer == right for answer in reversals(probes, True))
    without = reversals(probes, False)
    assert all(answer != right for answer in without)
    assert without[0] != without[1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (0, "wait for others that never come"),
        (1, "wait at different barriers"),
        (2, "wait for others that never come"),
        (3, "for a part of the warp"),
        (4, "wait for memory that no one writes"),
    ],
)
def test_divergence_is_an_error_that_names_the_place(probes: ctypes.CDLL, kind: int, words: str) -> None:
    assert probes.probe_diverge(THREADS, kind) == 1
    assert words in error(probes)
    assert "probes.cu" in error(probes) or kind == 4
    out = np.zeros(THREADS, np.int32)
    assert probes.probe_reverse(THREADS, address(out), 1) == 0, "a launch after a failed one is as good as any"
    assert error(probes) == ""


def test_a_load_that_is_not_aligned_is_an_error_that_names_the_place(probes: ctypes.CDLL) -> None:
    memory = np.zeros(32, np.int32)
    aligned = memory[-memory.ctypes.data // 4 % 4 :]
    aligned[:8] = range(8)
    out = aligned[16:]
    assert probes.probe_load(address(aligned[4:]), address(out)) == 0
    assert out[:4].tolist() == [4, 5, 6, 7]
    assert probes.probe_load(address(aligned[5:]), address(out)) == 1
    assert error(probes).startswith("a load of 16 bytes at probes.cu:")
    assert error(probes).endswith("is not aligned")


def test_using_more_shared_memory_than_requested_is_an_error(probes: ctypes.CDLL) -> None:
    out = np.zeros(32, np.int32)
    assert probes.probe_static_shared(address(out)) == 1
    assert "bytes of shared memory" in error(probes)
    for size, allowed, fails in (
        (48 << 10, 0, 0),
        ((48 << 10) + 16, 0, 1),
        (60 << 10, 60 << 10, 0),
        (100 << 10, 1 << 20, 1),
    ):
        assert probes.probe_dynamic_shared(address(out), size, allowed) == fails, size


def test_a_write_beyond_the_dynamic_shared_memory_is_an_error(probes: ctypes.CDLL) -> None:
    assert probes.probe_write_behind(1000, 999) == 0
    for at in (1000, 1200):
        assert probes.probe_write_behind(1000, at) == 1
        assert "beyond its dynamic shared memory" in error(probes)


def test_resident_blocks_can_wait_for_each_other(probes: ctypes.CDLL) -> None:
    for seed in range(1, 5):
        probes.probe_settings(seed, 4)
        arrived, out = np.zeros(2, np.uint32), np.zeros(7, np.int32)
        assert probes.probe_meet(4, address(arrived), address(out), 7) == 0
        assert out.tolist() == [4 * 64] * 7


@pytest.mark.long
def test_no_kernel_reads_beyond_an_array_or_from_an_address_that_is_not_aligned(
    request: pytest.FixtureRequest, emulated_library: Path
) -> None:
    """The sanitizer checks neither __ldg nor __ldcg."""
    assert request.config.cache is not None
    checks = ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    path = built(request.config.cache.mkdir("emulated"), checks)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    words = [sys.executable, str(Path(__file__).with_name("guarded.py")), str(path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

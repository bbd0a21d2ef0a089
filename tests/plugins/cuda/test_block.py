"""Block-wide operations agree with numpy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.plugins.cuda.test_emulator import address

THREADS = (32, 64, 160, 256, 1024)


@pytest.mark.parametrize("threads", THREADS)
def test_entries_are_sorted_by_key_and_equal_keys_by_item(probes: ctypes.CDLL, threads: int) -> None:
    rng = np.random.default_rng(threads)
    for size in (2, 8, 64, 128, 1024):
        keys = rng.integers(0, size // 2, size, np.uint64) << np.uint64(40)
        items = rng.permutation(size).astype(np.uint32)
        order = np.lexsort((items, keys))
        wanted = keys[order], items[order]
        assert probes.probe_sort(threads, address(keys), address(items), size) == 0
        assert np.array_equal(keys, wanted[0])
        assert np.array_equal(items, wanted[1])
        alone = rng.permutation(size).astype(np.uint64)
        assert probes.probe_sort(threads, address(alone), None, size) == 0
        assert np.array_equal(alone, np.arange(size))


@pytest.mark.parametrize("threads", THREADS)
def test_distinct_keys_are_sorted_by_counting(probes: ctypes.CDLL, threads: int) -> None:
    rng = np.random.default_rng(threads)
    for count in (1, 2, 31, 33, 256):
        keys = np.unique(rng.integers(0, 1 << 63, count, np.uint64))
        shuffled, out = rng.permutation(keys), np.zeros(len(keys), np.uint64)
        assert probes.probe_rank_sort(threads, address(shuffled), len(keys), address(out)) == 0
        assert np.array_equal(out, keys)


def test_prefix_sums_are_the_same_bits_for_any_number_of_threads_and_any_length_behind(probes: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    for count in (1, 5, 32, 33, 100, 1000, 1056, 4096):
        given = np.exp(-rng.exponential(5.0, (2, count)))
        answers = []
        for threads in THREADS:
            sums = given.copy()
            assert probes.probe_scan(threads, address(sums[0]), address(sums[1]), count) == 0
            answers.append(sums)
        longer = np.concatenate([given[0], np.ones(4096 - count)])
        assert probes.probe_scan(64, address(longer), None, len(longer)) == 0
        assert np.array_equal(longer[:count], answers[0][0])
        assert all(np.array_equal(answers[0], other) for other in answers[1:])
        np.testing.assert_allclose(answers[0], np.cumsum(given, axis=1), rtol=1e-14)


@pytest.mark.parametrize("threads", THREADS)
def test_kept_entries_are_moved_together_in_their_order(probes: ctypes.CDLL, threads: int) -> None:
    rng = np.random.default_rng(threads)
    for count in (1, 32, 100, 3000):
        kept = (rng.random(count) < rng.random()).astype(np.int32)
        places, found = np.full(count, -1, np.int32), np.zeros(1, np.int32)
        assert probes.probe_compact(threads, address(kept), count, address(places), address(found)) == 0
        assert np.array_equal(places[: found[0]], np.flatnonzero(kept))


@pytest.mark.parametrize("threads", [32, 256])
def test_the_nth_smallest_key_is_selected(probes: ctypes.CDLL, threads: int) -> None:
    rng = np.random.default_rng(threads)
    spreads = (1, 2, 200, 257, 5000, 1 << 17, 1 << 32)
    for spread in spreads:
        for count in (1, 2, 40, 2374):
            keys = (rng.integers(0, spread, count) + rng.integers(0, (1 << 32) - spread + 1)).astype(np.uint32)
            wanted = int(rng.integers(1, count + 1))
            bound = np.zeros(1, np.uint32)
            assert probes.probe_select(threads, address(keys), count, wanted, wanted, address(bound)) == 0
            assert np.sum(keys <= bound) >= wanted
            assert np.sum(keys < np.sort(keys)[wanted - 1]) < wanted <= np.sum(keys <= bound)
            assert not np.any((keys > np.sort(keys)[wanted - 1]) & (keys <= bound)), (spread, count, wanted)
            enough = wanted + count // 8
            assert probes.probe_select(threads, address(keys), count, wanted, enough, address(bound)) == 0
            reached = int(np.sum(keys <= bound))
            assert wanted <= reached <= max(enough, int(np.sum(keys <= np.sort(keys)[wanted - 1])))


@pytest.mark.parametrize("threads", THREADS)
def test_the_best_is_the_first_of_the_largest_and_the_scratch_is_free_at_once(
    probes: ctypes.CDLL, threads: int
) -> None:
    rng = np.random.default_rng(threads)
    for seed, count in enumerate((1, 3, 100, 2000, 2000)):
        probes.probe_settings(seed + 1, 4)
        values = rng.integers(0, 5, count).astype(np.float64)
        place = np.zeros(1, np.int32)
        assert probes.probe_best(threads, address(values), count, address(place)) == 0
        assert place[0] == np.argmax(values)

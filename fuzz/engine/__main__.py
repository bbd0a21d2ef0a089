"""Soak the batching engine with random callers, faults and restarts.

    python -m fuzz.engine [--seconds 3600] [--seed 0] [--replay 0.25] [--leak BYTES]

The program exits with 1 if a request is lost, is stuck, or draws other tokens than it draws alone. It also does so if
memory, handles or threads grow.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from fuzz.engine.callers import STUCK
from fuzz.engine.episodes import Report, run_episode
from fuzz.engine.flatness import ALLOWED, Sample, growth, leaks, sample
from fuzz.engine.models import open_subjects

_EPISODE = 4.0  # seconds that the engines of an episode live
_PRINT_EVERY = 60.0  # seconds


class Watchdog:
    """Ends the process if no counter of the report has changed for 3 STUCK; prints the stacks of all threads first."""

    def __init__(self, report: Report) -> None:
        self._report = report
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while True:
            faulthandler.dump_traceback_later(4 * STUCK, exit=True)  # if this thread is stuck too
            time.sleep(1.0)
            now = self._report.counts.total()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > 3 * STUCK:
                print(f"nothing has happened for {3 * STUCK:.0f} s", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(2)


def soak(folder: Path, seconds: float, seed: int, replay: float, leak: int) -> int:
    """Run episodes for `seconds`, or until something is wrong. Returns the exit code.

    replay: the share of the outcomes that are compared with `generate`.
    leak: bytes to leak for each request, which the test must notice.
    """
    report, samples, leaked = Report(), list[Sample](), list[bytearray]()
    subjects = open_subjects(folder, seed)
    Watchdog(report)
    began = printed = time.monotonic()
    episode = 0
    while time.monotonic() - began < seconds and not report.wrong:
        before = report.counts["requests"]
        try:
            run_episode(subjects, np.random.default_rng([seed, episode]), _EPISODE, replay, report)
        except TimeoutError as error:
            report.complain([str(error)])
            faulthandler.dump_traceback(all_threads=True)
        leaked += [bytearray(leak) for _ in range(report.counts["requests"] - before)] if leak else []
        episode += 1
        samples.append(sample(report.counts["requests"]))
        if time.monotonic() - printed > _PRINT_EVERY:
            printed = time.monotonic()
            print(f"{printed - began:.0f} s: {samples[-1]}", flush=True)
    report.complain(leaks(samples))
    _print(report, samples, time.monotonic() - began, sum(subject.faults.injected for subject in subjects))
    sys.stdout.flush()
    return 1 if report.wrong else 0


def _print(report: Report, samples: list[Sample], seconds: float, injected: int) -> None:
    counts = report.counts
    print(f"{counts['requests']} requests in {seconds:.0f} s, {counts['replayed']} replayed alone")
    print(f"{counts['engines']} engines, {injected} runs failed on purpose")
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")
    for name in ALLOWED:
        grown = growth(samples, name)
        after = (
            "too few samples" if grown is None else f"{grown[0]:+,.0f} after the first third, {grown[1]:,.0f} allowed"
        )
        print(f"{name}: {getattr(samples[0], name):,} to {getattr(samples[-1], name):,}; {after}")
    for one in report.wrong:
        print(f"WRONG: {one}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=float, default=1.0, help="share of the requests that are compared")
    parser.add_argument("--leak", type=int, default=0, help="bytes to leak per request, which must be found")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topw-soak-") as scratch:
        return soak(Path(scratch), given.seconds, given.seed, given.replay, given.leak)


if __name__ == "__main__":
    sys.exit(main())

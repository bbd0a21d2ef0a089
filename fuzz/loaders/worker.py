"""Fuzz one loader in this process.

    python -m fuzz.loaders.worker NAME REPORT --seconds 60 --seed 0 --engine atheris|random

With atheris, libFuzzer guides the inputs by the coverage of topw_deploy. Without it, inputs are random changes of seeds
and of earlier inputs that were read or refused in a new way.

An input that takes longer than SECONDS ends the process. The report is JSON with the keys inputs, refused, kinds,
findings and running, the hash of the input that was read when the report was written.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from topw_deploy.errors import TopWError

SECONDS = 30
"""The longest time that an input may take. A grammar may take 10 s to compile, and the machine may be busy."""
MEMORY = 1 << 30
"""The largest number of bytes by which an input may raise the peak of the process's memory."""
_WRITE_EVERY = 1.0  # seconds
_DETAILS = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S*|[0-9]+")
_LARGEST_CORPUS = 2000  # inputs; without atheris


class Run:
    """Passes inputs to a loader, counts their outcomes and writes the report.

    report: the report's file; None for none.
    artifacts: the folder for inputs that are findings.
    """

    def __init__(self, name: str, report: Path | None, artifacts: Path, scratch: Path) -> None:
        from fuzz.loaders.targets import LOADERS, refusal

        self.loader, self._refusal = LOADERS[name](scratch), refusal
        self.inputs = self.refused = 0
        self.kinds: dict[str, int] = {}
        self.findings: dict[str, str] = {}
        self._name, self._report, self._artifacts = name, report, artifacts
        self._written = 0.0

    def __call__(self, data: bytes) -> str:
        """Pass an input to the loader. Returns the kind of outcome: "read", a refusal without details, or a finding."""
        self.inputs += 1
        before = _peak()
        self._write(data)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            error = self._refusal(self.loader, data)
            kind = "read" if error is None else _kind(error)
        except BaseException as unexpected:  # Rust panics are not Exceptions
            if isinstance(unexpected, (KeyboardInterrupt, SystemExit)):
                raise
            kind = self._found(_place(unexpected), data)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if (grown := _peak() - before) > MEMORY:
            kind = self._found(f"the memory grew by {grown >> 20} MiB", data)
        self.refused += kind != "read"
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        return kind

    def finish(self) -> None:
        self._written = 0.0
        self._write(b"")

    def _found(self, what: str, data: bytes) -> str:
        if what not in self.findings:
            path = self._artifacts / f"{self._name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            self.findings[what] = str(path)
            self.finish()
        return f"finding: {what}"

    def _write(self, running: bytes) -> None:
        if self._report is None or time.monotonic() - self._written < _WRITE_EVERY:
            return
        self._written = time.monotonic()
        found: dict[str, Any] = {"inputs": self.inputs, "refused": self.refused, "kinds": len(self.kinds)}
        found |= {"findings": self.findings, "running": hashlib.sha256(running).hexdigest()[:12]}
        self._report.write_text(json.dumps(found))


def run_random(
    run: Callable[[bytes], str], seeds: tuple[bytes, ...], rng: random.Random, goes_on: Callable[[], bool]
) -> None:
    """Change inputs at random. Inputs with a new kind of outcome join the corpus, to be changed further."""
    from fuzz.loaders.mutate import mutate

    corpus, seen = list(seeds), {run(seed) for seed in seeds}
    while goes_on():
        data = mutate(rng.choice(corpus), rng)
        kind = run(data)
        if kind not in seen and len(corpus) < _LARGEST_CORPUS:
            seen.add(kind)
            corpus.append(data)


def _run_atheris(run: Run, folder: Path, seconds: int, seed: int) -> None:
    import atheris

    from fuzz.loaders.mutate import LONGEST, mutate

    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(run.loader.seeds):
        (corpus / str(number)).write_bytes(data)
    rng = random.Random(seed)

    def other(data: bytes, most: int, _seed: int) -> bytes:
        return (mutate(data, rng) if rng.random() < 0.5 else atheris.Mutate(data, min(most, LONGEST)))[:most]

    def one(data: bytes) -> None:
        run(data)

    options = [f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-max_len={LONGEST}", "-len_control=0"]
    options += [f"-timeout={2 * SECONDS}", "-rss_limit_mb=8192", f"-artifact_prefix={folder}/", "-verbosity=0"]
    atheris.Setup([sys.argv[0], str(corpus), *options], one, custom_mutator=other)
    atheris.Fuzz()


def _kind(error: TopWError) -> str:
    """The class of a refusal and its message without quoted text, paths and numbers."""
    return f"{type(error).__name__}: {_DETAILS.sub('', str(error))[:100]}"


def _place(error: BaseException) -> str:
    """The class of an unexpected error, and the last line of this package in its traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "topw_deploy" in frame.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:150]!r}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("atheris", "random"), default="random")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topw-fuzz-") as place:
        (Path(place) / "scratch").mkdir()
        artifacts = given.report.parent
        if given.engine == "atheris":
            import atheris

            with atheris.instrument_imports(include=["topw_deploy"]):
                run = Run(given.name, given.report, artifacts, Path(place) / "scratch")
        else:
            run = Run(given.name, given.report, artifacts, Path(place) / "scratch")
        began = time.monotonic()
        if given.engine == "atheris":
            _run_atheris(run, Path(place), given.seconds, given.seed)  # ends the process
        else:
            rng = random.Random(given.seed)
            run_random(run, run.loader.seeds, rng, lambda: time.monotonic() - began < given.seconds)
        run.finish()


if __name__ == "__main__":
    main()

"""Fuzz one loader in this process.

    python -m fuzz.loaders.worker NAME FOLDER --seconds 60 --seed 0 --engine atheris|random

With atheris, libFuzzer guides the inputs by the coverage of topw_deploy. Without it, inputs are random changes of seeds
and of earlier inputs that were read or refused in a new way.

FOLDER gets the inputs that are findings, NAME.json with the keys inputs, refused, kinds and findings, and NAME.running,
the input that is being read: one that takes longer than SECONDS ends the process.
"""

from __future__ import annotations

import argparse
import contextlib
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

SECONDS = 30
"""The longest time that an input may take. A grammar may take 10 s to compile, and the machine may be busy."""
MEMORY = 1 << 30
"""The largest number of bytes by which an input may raise the peak of the process's memory."""
_WRITE_EVERY = 1.0  # seconds; libFuzzer ends the process without returning
_DETAILS = re.compile(r"'[^']*'|\"[^\"]*\"|\S*/\S*|[0-9]+")
_LARGEST_CORPUS = 2000  # inputs; without atheris


class Run:
    """Passes inputs to a loader, counts their outcomes and writes the report into `folder`."""

    def __init__(self, name: str, folder: Path, scratch: Path) -> None:
        from fuzz.loaders.targets import LOADERS, refusal

        self.loader, self._refusal = LOADERS[name](scratch), refusal
        self.inputs = self.refused = 0
        self.kinds: set[str] = set()
        self.findings: dict[str, str] = {}
        self._name, self._folder, self._written = name, folder, 0.0
        self.running = folder / f"{name}.running"

    def __call__(self, data: bytes) -> str:
        """Pass an input to the loader. Returns the kind of outcome: "read", a refusal without details, or a finding."""
        self.inputs += 1
        self.running.write_bytes(data)
        before = _peak()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            error = self._refusal(self.loader, data)
            # The class and the message without quoted text, paths and numbers.
            kind = "read" if error is None else f"{type(error).__name__}: {_DETAILS.sub('', str(error))[:100]}"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as unexpected:  # noqa: BLE001  # Rust panics are not Exceptions
            kind = self._found(_place(unexpected), data)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if (grown := _peak() - before) > MEMORY:
            kind = self._found(f"the memory grew by {grown >> 20} MiB", data)
        self.refused += kind != "read"
        self.kinds.add(kind)
        if time.monotonic() - self._written > _WRITE_EVERY:
            self.write()
        return kind

    def _found(self, what: str, data: bytes) -> str:
        if what not in self.findings:
            path = self._folder / f"{self._name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            self.findings[what] = str(path)
            self.write()
        return f"finding: {what}"

    def write(self) -> None:
        """Write the report."""
        self._written = time.monotonic()
        found: dict[str, Any] = {"inputs": self.inputs, "refused": self.refused, "kinds": len(self.kinds)}
        (self._folder / f"{self._name}.json").write_text(json.dumps({**found, "findings": self.findings}))


def run_random(run: Run, rng: random.Random, goes_on: Callable[[], bool]) -> None:
    """Change inputs at random. Inputs with a new kind of outcome join the corpus, to be changed further."""
    from fuzz.loaders.mutate import mutate

    corpus = list(run.loader.seeds)
    seen = {run(seed) for seed in corpus}
    while goes_on():
        data = mutate(rng.choice(corpus), rng)
        kind = run(data)
        if kind not in seen and len(corpus) < _LARGEST_CORPUS:
            seen.add(kind)
            corpus.append(data)


def _run_atheris(run: Run, folder: Path, seconds: int, seed: int) -> None:
    """Ends the process."""
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


def _place(error: BaseException) -> str:
    """The class of an unexpected error, and the last line of this package in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "topw_deploy" in frame.filename), frames[-1])
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:150]!r}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("atheris", "random"), default="random")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topw-fuzz-") as place, contextlib.ExitStack() as instrumented:
        scratch = Path(place, "scratch")
        scratch.mkdir()
        if given.engine == "atheris":
            import atheris

            instrumented.enter_context(atheris.instrument_imports(include=["topw_deploy"]))
        run = Run(given.name, given.folder, scratch)
        if given.engine == "atheris":
            instrumented.close()
            _run_atheris(run, Path(place), given.seconds, given.seed)
        end = time.monotonic() + given.seconds
        run_random(run, random.Random(given.seed), lambda: time.monotonic() < end)
        run.write()
        run.running.unlink()


if __name__ == "__main__":
    main()

"""Fuzz every loader of files and requests.

    python -m fuzz.loaders [--seconds 60] [--only NAME ...] [--engine atheris|random] [--artifacts FOLDER]

Each loader runs in a process of its own for the given seconds. A finding is an exception that is not of
topw_deploy.errors, or an input that takes longer than 30 s, makes the process grow by more than 1 GiB, or ends it. The
program exits with 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzz.loaders.targets import LOADERS

_STARTUP = 600  # seconds in addition, to import, to make seeds and to end; enough on a busy machine


def fuzz(name: str, seconds: int, seed: int, engine: str, artifacts: Path) -> dict[str, Any]:
    """Run the worker for one loader. Returns its report.

    If the process fails or does not end, that is a finding too.
    """
    report = artifacts / f"{name}.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fuzz.loaders.worker", name, str(report)]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--engine", engine]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + _STARTUP)
        status, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        status, said = -1, str(error)
    found: dict[str, Any] = {"inputs": 0, "refused": 0, "kinds": 0, "findings": {}}
    if report.exists():
        found = json.loads(report.read_text())
    if status:
        found["findings"][f"the process ended with {status}"] = said[-2000:]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="per loader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=tuple(LOADERS), default=list(LOADERS))
    parser.add_argument("--engine", choices=("atheris", "random"), help="default: atheris, if it is installed")
    parser.add_argument("--artifacts", type=Path, help="a folder that keeps the inputs that are findings")
    given = parser.parse_args()
    engine = given.engine or ("random" if importlib.util.find_spec("atheris") is None else "atheris")
    artifacts = given.artifacts or Path(tempfile.mkdtemp(prefix="topw-fuzz-loaders-"))
    artifacts.mkdir(parents=True, exist_ok=True)
    wrong = 0
    print(
        f"engine {engine}, {given.seconds} s for each of {len(given.only)} loaders, findings in {artifacts}", flush=True
    )
    for name in given.only:
        found = fuzz(name, given.seconds, given.seed, engine, artifacts)
        wrong += len(found["findings"])
        print(f"{name}: {found['inputs']} inputs, {found['refused']} refused in {found['kinds']} ways", flush=True)
        for what, where in found["findings"].items():
            print(f"  {what}\n    {where}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

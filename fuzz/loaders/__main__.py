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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="per loader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=tuple(LOADERS), default=list(LOADERS))
    parser.add_argument("--engine", choices=("atheris", "random"), help="default: atheris, if it is installed")
    parser.add_argument("--artifacts", type=Path, help="a folder that keeps the inputs that are findings")
    given = parser.parse_args()
    engine = given.engine or ("random" if importlib.util.find_spec("atheris") is None else "atheris")
    folder = given.artifacts or Path(tempfile.mkdtemp(prefix="topw-fuzz-loaders-"))
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--seconds", str(given.seconds), "--seed", str(given.seed), "--engine", engine]
    print(f"engine {engine}, {given.seconds} s for each of {len(given.only)} loaders, findings in {folder}", flush=True)
    wrong = False
    for name in given.only:
        report = folder / f"{name}.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "fuzz.loaders.worker", name, str(folder), *options]
        limit = given.seconds + _STARTUP
        failure = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit)
            if done.returncode:
                failure = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
        except subprocess.TimeoutExpired as error:
            failure = str(error)
        found: dict[str, Any] = {"inputs": 0, "refused": 0, "kinds": 0, "findings": {}}
        if report.exists():
            found = json.loads(report.read_text())
        findings = found["findings"] | ({failure: folder / f"{name}.running"} if failure else {})
        print(f"{name}: {found['inputs']} inputs, {found['refused']} refused in {found['kinds']} ways", flush=True)
        for what, where in findings.items():
            print(f"  {what}\n    {where}", flush=True)
        wrong = wrong or bool(findings)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

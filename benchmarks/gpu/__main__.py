"""Checks and measurements on an NVIDIA GPU, without network or installation:

    python3 -m benchmarks.gpu [--pack ARCHIVE ...] [--budget SECONDS] [--only PART ...] [--out DIR]

Run it from a checkout, with a Python that has torch. It builds the kernels, compares them with the reference, runs them
under compute-sanitizer and in CUDA graphs, times them, and runs whole models. DIR gets `results.json` and `results.md`.
Run it again to continue; finished steps repeat only with --again, or after a change of kernels, torch or GPU.

Exit code: 0 if every step passed, 1 if one failed or there is no GPU, 3 if steps remain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]  # this project is not installed on the host

from benchmarks.gpu.archives import unpack  # noqa: E402
from benchmarks.gpu.job import PARTS, REHEARSAL, Job  # noqa: E402
from benchmarks.gpu.record import PARTIAL, WAITING, Record  # noqa: E402
from benchmarks.gpu.runner import Run, environment, say  # noqa: E402
from topw_deploy.errors import BenchmarkError  # noqa: E402
from topw_deploy.install import installed_version  # noqa: E402

_PLUGINS, _CODE = ROOT / "src" / "topw_deploy" / "plugins", {".cu", ".cuh", ".cpp", ".h"}
_UNFINISHED = 3


_PACKAGES = (
    "torch", "numpy", "triton", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "tensorrt", "cuda-bindings", "cupy-cuda13x", "safetensors", "tokenizers",
)  # fmt: skip
_DRIVER_LIMIT = 60  # seconds; a driver may hang
_QUERY = """
import json
from topw_deploy.plugins import library

found = library.query_driver()
first = found.devices[0] if found.devices else library.Device("", 0)
print(json.dumps([first.name, first.architecture, found.why_none, found.cuda or ""]))
"""


def describe_machine() -> dict[str, Any]:
    """Describe this machine; `GPU` begins with "none" without one. A child queries the driver, as that may hang."""
    words = [sys.executable, "-c", _QUERY]
    limits: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": _DRIVER_LIMIT}
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment(), **limits)
        gpu, architecture, why_none, cuda = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        gpu, architecture, why_none, cuda = "", 0, f"the NVIDIA driver did not answer within {_DRIVER_LIMIT} s", ""
    except ValueError:
        gpu, architecture, cuda = "", 0, ""
        why_none = f"the driver could not be queried ({done.stderr.strip()[-300:]})"
    versions = {name: found for name in _PACKAGES if (found := installed_version(name))}
    return {
        "GPU": gpu or f"none: {why_none}",
        "architecture": architecture,
        "driver's CUDA": cuda,
        "processor": platform.processor() or platform.machine(),
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python3 -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of results; default: out/gpu, or out/rehearsal")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after this time")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="repeat finished steps")
    parser.add_argument("--library", dest="kernels", type=Path, help="compiled kernels; default: compile them")
    parser.add_argument("--pack", nargs="+", type=Path, default=[], metavar="ARCHIVE", help="packed archives")
    parser.add_argument("--folder", nargs="+", type=Path, default=[], help="exported models; default: the packed ones")
    parser.add_argument("--rows", type=int, default=100_000, help="random rows to compare; default: 100,000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of every measurement; default: 50")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with emulated kernels and small sizes")
    return parser


def digest_of_kernels(library: Path | None) -> str:
    """Digest of the given library, or of the sources if none is given."""
    written = (file for folder in ("cuda", "native") for file in (_PLUGINS / folder).iterdir())
    sources = [library] if library is not None else sorted(file for file in written if file.suffix in _CODE)
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:12]


def main() -> int:
    if sys.argv[1:2] == ["pack"]:
        from benchmarks.gpu import pack

        return pack.main(sys.argv[2:])
    given = arguments().parse_args()
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end too
    if given.kernels is not None and not given.kernels.is_file():
        raise SystemExit(f"{given.kernels} is not a file; give a library with --library, or omit it.")
    out = (given.out or ROOT / "out" / ("rehearsal" if given.rehearse else "gpu")).absolute()
    machine = describe_machine()
    try:
        record = Record(out, given.rehearse)
        record.machine = machine
        record.write()
        if given.rehearse:
            say(REHEARSAL)
        elif machine["GPU"].startswith("none"):
            say(f"NOTHING WAS RUN: there is no CUDA GPU here ({machine['GPU']}); --rehearse runs it on a CPU.")
            return 1
        if given.pack:
            unpack(given.pack, out / "packed")
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
    kernels = digest_of_kernels(given.kernels)
    kind = "emulated" if given.rehearse else "cuda"
    library = (given.kernels or out / f"libtopw_{kind}-{kernels}.so").absolute()
    folders = [str(folder.absolute()) for folder in given.folder]
    job = Job(
        out, library, given.rehearse, given.rows, given.seed, given.rounds, folders, machine["architecture"],
        given.kernels is not None,
    )  # fmt: skip
    base = "\0".join([kernels, installed_version("torch") or "", machine["GPU"], str(given.rehearse)])
    run = Run(record, job, base, started + given.budget, given.again)
    parts = [part for part in PARTS if part in given.only or (part == "build" and not library.is_file())]
    for part in parts:
        run.part(part)
    return conclude(record, parts)


def conclude(record: Record, parts: list[str]) -> int:
    """Print tables and remaining steps; returns the exit code."""
    print(record.tables())
    mine = {key: entry for key, entry in record.steps.items() if key.split("/")[0] in parts}
    failed = [key for key, entry in mine.items() if entry.get("failed")]
    unfinished = [key for key, entry in mine.items() if entry["state"] in (WAITING, PARTIAL)]
    if unfinished:
        say(f"{len(unfinished)} steps are not finished ({', '.join(unfinished)}): run the same command again.")
    if failed:
        say(f"{len(failed)} steps FAILED: {', '.join(failed)}.")
    say(f"Results: {record.folder}" + (" (REHEARSAL)" if record.rehearsal else ""))
    return 1 if failed else _UNFINISHED if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())

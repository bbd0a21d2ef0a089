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
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src")]  # this project is not installed on the host

from benchmarks.gpu.archives import unpack  # noqa: E402
from benchmarks.gpu.job import PARTS, REHEARSAL, Job  # noqa: E402
from benchmarks.gpu.record import PARTIAL, TABLES, WAITING, Record, RecordError  # noqa: E402
from benchmarks.gpu.runner import Run, environment, say  # noqa: E402
from topw_deploy.errors import BenchmarkError  # noqa: E402

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


@dataclass(frozen=True)
class Machine:
    """A machine and its GPU.

    architecture: 90 for sm_90; 0 without a GPU.
    why_none: a clause on why there is no GPU; empty with one.
    cuda: the newest CUDA version that the driver supports.
    """

    gpu: str
    architecture: int
    why_none: str
    cuda: str
    versions: dict[str, str]

    def as_table(self) -> dict[str, Any]:
        return {
            "GPU": self.gpu or f"none: {self.why_none}",
            "architecture": f"sm_{self.architecture}" if self.gpu else "",
            "driver's CUDA": self.cuda,
            "processor": platform.processor() or platform.machine(),
            "Python": platform.python_version(),
            "packages": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }


def describe_machine() -> Machine:
    """Describe this machine. A child process queries the driver and is killed if it hangs."""
    versions = {name: found for name in _PACKAGES if (found := _version(name))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUERY], cwd=ROOT, env=environment(), capture_output=True, text=True,
            errors="replace", timeout=_DRIVER_LIMIT,
        )  # fmt: skip
        gpu, architecture, why_none, cuda = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Machine("", 0, f"the NVIDIA driver did not answer within {_DRIVER_LIMIT} s", "", versions)
    except ValueError:
        return Machine("", 0, f"the driver could not be queried ({done.stderr.strip()[-300:]})", "", versions)
    return Machine(gpu, architecture, why_none, cuda, versions)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python3 -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, help="folder of results; default: out/gpu of the checkout, or out/rehearsal"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after this time")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="repeat finished steps")
    parser.add_argument(
        "--library", dest="kernels", type=Path, help="compiled kernels; default: compile them for this GPU"
    )
    parser.add_argument(
        "--pack",
        nargs="+",
        type=Path,
        default=[],
        metavar="ARCHIVE",
        help="archives of `benchmarks.gpu pack`",
    )
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
    except RecordError as error:
        raise SystemExit(str(error)) from None
    record.describe_machine(machine.as_table())
    if given.rehearse:
        say(REHEARSAL)
    elif not machine.gpu:
        say(f"NOTHING WAS RUN: there is no CUDA GPU here ({machine.why_none}); --rehearse runs the command on a CPU.")
        return 1
    kernels = digest_of_kernels(given.kernels)
    kind = "emulated" if given.rehearse else "cuda"
    library = (given.kernels or out / f"libtopw_{kind}-{kernels}.so").absolute()
    try:
        missing = unpack(given.pack, out / "packed") if given.pack else []
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
    for sentence in missing:
        say(f"NOT UNPACKED {sentence}")
    job = Job(
        out, library, given.rehearse, given.rows, given.seed, given.rounds,
        [str(folder.absolute()) for folder in given.folder], machine.architecture, given.kernels is not None,
    )  # fmt: skip
    base = "\0".join([kernels, machine.versions.get("torch", ""), machine.gpu, str(given.rehearse)])
    parts = [part for part in PARTS if part in given.only or (part == "build" and not library.is_file())]
    run = Run(record, job, base, started + given.budget, given.again)
    run.parts(parts)
    return conclude(record, parts, out)


def conclude(record: Record, parts: list[str], out: Path) -> int:
    """Print tables and remaining steps; returns the exit code."""
    print((out / TABLES).read_text(encoding="utf-8"))
    mine = {key: entry for key, entry in record.steps.items() if key.split("/")[0] in parts}
    failed = [key for key, entry in mine.items() if entry.get("failed")]
    unfinished = [key for key, entry in mine.items() if entry["state"] in (WAITING, PARTIAL) or entry.get("stale")]
    if unfinished:
        say(f"{len(unfinished)} steps are not finished ({', '.join(unfinished)}): run the same command again.")
    if failed:
        say(f"{len(failed)} steps FAILED: {', '.join(failed)}.")
    say(f"Results: {out}" + (" (REHEARSAL)" if record.rehearsal else ""))
    return 1 if failed else _UNFINISHED if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())

"""The whole verification on a machine with an NVIDIA GPU: builds, checks, captures, measures.

    python -m benchmarks.gpu [--rows 100000] [--rounds 50] [--library PATH] [--only check capture speed models]

Needs torch with CUDA, and nvcc unless --library names a library that is built. Kernels: every row of a random mix
against the reference (100,000 rows), repeats, batches, capture into a CUDA graph, times beside torch's samplers (and
FlashInfer's where it is installed) with the distance to the memory's speed, the share of a decode step of 3 B
parameters. Models: the bundled one, exported here, with the tokens of provider="cuda" (onnxruntime-gpu) beside those
of the CPU, as launched and as a CUDA graph, and where TensorRT is installed those of an engine built here. Prints
markdown; exits 1 if a kernel answers differently.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import Spread, machine, ratio, say
from benchmarks.fuzz_cuda import fuzz
from benchmarks.fuzz_sampler import report
from benchmarks.gpu import checks, runtimes, speed
from benchmarks.gpu.device import DeviceKernel
from topw_deploy.errors import PluginError
from topw_deploy.plugins import cuda_build

PARTS = ("check", "capture", "speed", "models")


def kernels(given: Path | None, scratch: Path) -> Path:
    """The library to check: the one named, or one built for this GPU. Raises PluginError."""
    if given is not None:
        return given
    major, minor = torch.cuda.get_device_capability()
    say(f"building the kernels for sm_{major}{minor}")
    built = cuda_build.build(scratch / "libtopw_cuda.so", (10 * major + minor,), tell=say)
    say(f"{built.size / 1e6:.1f} MB in {built.seconds:.0f} s")
    return built.path


def speeds(kernel: DeviceKernel, rounds: int) -> None:
    rate = speed.bandwidth(kernel.device)
    print(f"Reading memory: {rate / 1e9:,.0f} GB/s.\n")
    for batch in (1, 8, 64, 256):
        sides, notes = speed.certified_sides(kernel, kernel.device, batch)
        measured = speed.measure(sides, rounds, notes)
        floor = batch * speed.VOCAB * 4 / rate * 1e6
        print(f"Certified rows, vocabulary {speed.VOCAB:,}, {speed.lines(measured, batch, floor)}\n", flush=True)
    for batch in (1, 8):
        sides, notes = speed.uncertified_sides(kernel, kernel.device, batch)
        print(f"Rows that need geometry, {speed.lines(speed.measure(sides, rounds, notes), batch)}\n", flush=True)
    measured = speed.measure(speed.model_step_sides(kernel, kernel.device), rounds)
    times = measured.microseconds
    added = Spread.of([w / d - 1 for w, d in zip(times["decoder and Top-W"], times["decoder"], strict=True)])
    alone = ratio(times, "Top-W", "decoder")
    print(
        f"A decode step of 3 B parameters in float16: {Spread.of(times['decoder']).format(digits=0)} us; Top-W adds "
        f"{added.format(100)} %, and alone takes {alone.format(100)} % of it.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--library", type=Path, dest="kernels", help="default: built here, for this GPU")
    parser.add_argument(
        "--folder", type=Path, nargs="+", help="exported models for onnxruntime; default: the demo in two forms"
    )
    parser.add_argument("--tensorrt-folder", type=Path, help="one with an engine for this GPU; default: the demo")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        reason = (
            "there is no CUDA GPU here" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        )
        raise SystemExit(f"{reason}, so nothing was checked; run it on a machine with a GPU, with a torch for CUDA.")
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; {machine()}\n")
    failed = False
    with tempfile.TemporaryDirectory(prefix="topw-gpu-") as scratch:
        try:
            kernel = DeviceKernel(kernels(given.kernels, Path(scratch)), torch.device("cuda"))
        except PluginError as error:
            raise SystemExit(str(error)) from None
        if "check" in given.only:
            outcome = fuzz(kernel, given.rows, given.seed)
            unexplained = [line for side in outcome.sides.values() for line in side.unexplained]
            print("\n".join([report(outcome), *unexplained[:20], ""]), flush=True)
            failed |= bool(unexplained)
        if "capture" in given.only:
            found = checks.run(kernel)
            print("\n".join(f"- {'yes' if good else 'NO'}: {sentence}" for sentence, good in found.items()) + "\n")
            failed |= not all(found.values())
        if "speed" in given.only:
            speeds(kernel, given.rounds)
        if "models" in given.only:
            folders = given.folder or runtimes.exported(Path(scratch))
            engine = given.tensorrt_folder or runtimes.with_engine(Path(scratch))
            print(runtimes.run(folders, engine, min(given.rounds, 20)) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

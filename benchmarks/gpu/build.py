"""The part `build`: compile the kernels and list their resources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.job import Job, Result, Step
from topw_lab.tables import table

_REHEARSED = 90  # sm_90 (H200), for rehearsals without a GPU
_LIMIT = 120  # seconds per tool


def steps(job: Job) -> list[Step]:
    compiling = [Step("kernels", kernels, 90, 470), Step("emulated", emulated, 40, 300)][: 2 if job.rehearse else 1]
    return [*([] if job.built else compiling), Step("resources", resources, 30, 200)]


def library_for_the_gpu(job: Job) -> Path:
    """The library that nvcc compiled; in rehearsals the emulated one."""
    return job.out / "libtopw_nvcc.so" if job.rehearse else job.kernel_file


def kernels(job: Job) -> Result:
    """Compile with nvcc. In a rehearsal without nvcc, the step is absent."""
    from topw_deploy.errors import PluginError
    from topw_deploy.plugins import nvcc

    said: list[str] = []
    try:
        built = nvcc.compile_cuda(library_for_the_gpu(job), (job.architecture or _REHEARSED,), say=said.append)
    except PluginError as error:
        no_compiler = job.rehearse and "there is no nvcc" in str(error)
        return Result(absent=(str(error),)) if no_compiler else Result(failed=str(error))
    data = {
        "nvcc": built.nvcc, "architectures": list(built.architectures), "seconds": round(built.seconds, 1),
        "bytes": built.size, "said": said,
    }  # fmt: skip
    return Result(data, f"nvcc {built.nvcc}, sm_{built.architectures[0]}: {built.size / 1e6:.1f} MB in "
                        f"{built.seconds:.0f} s")  # fmt: skip


def emulated(job: Job) -> Result:
    """Compile the same sources for the CPU, for rehearsals."""
    from tests.support.cuda_kernel import built

    started = time.perf_counter()
    made = built(job.folder("emulated"))
    shutil.copyfile(made, job.kernel_file)
    seconds = time.perf_counter() - started
    size = job.kernel_file.stat().st_size
    return Result({"seconds": seconds, "bytes": size}, f"emulation compiled in {seconds:.0f} s")


def resources(job: Job) -> Result:
    """Registers, stack, shared memory (cuobjdump) and spills (ptxas, from PTX) by kernel."""
    library = library_for_the_gpu(job)
    if not library.is_file():
        return Result(absent=(f"nvcc made no library {library.name}",))
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        return Result(absent=("cuobjdump is missing: registers and shared memory are unknown",))
    said = run_tool([cuobjdump, "--dump-resource-usage", str(library)])
    found = parse_usage(said)
    if not found:
        return Result(failed=f"cuobjdump names no kernel in {library.name}: {said.strip()[-500:]}")
    spilled, why = spills_by_kernel(library, cuobjdump)
    rows = []
    for name, values in found.items():
        values["spill stores"], values["spill loads"] = spilled.get(name, (None, None))
        rows.append((name, *("?" if value is None else value for value in values.values())))
    head = ("kernel", "registers", "stack bytes", "static shared bytes", "spill stores, bytes", "spill loads, bytes")
    return Result({"kernels": found}, table(head, rows), absent=(why,) if why else ())


def parse_usage(said: str) -> dict[str, dict[str, int | None]]:
    """Parse `cuobjdump --dump-resource-usage`."""
    pattern = re.compile(r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")
    return {
        plain_name(name): {"registers": int(registers), "stack": int(stack), "shared": int(shared)}
        for name, registers, stack, shared in pattern.findall(said)
    }


def spills_by_kernel(library: Path, cuobjdump: str) -> tuple[dict[str, tuple[int, int]], str]:
    """Returns (kernel -> bytes of spill (stores, loads), why they are unknown; empty if they are known)."""
    ptxas = find_tool("ptxas")
    if ptxas is None:
        return {}, "ptxas is missing: spills are unknown"
    with tempfile.TemporaryDirectory(prefix="topw-ptx-") as folder:
        run_tool([cuobjdump, "-xptx", "all", str(library)], Path(folder))
        found: dict[str, tuple[int, int]] = {}
        for file in sorted(Path(folder).glob("*.ptx")):
            target = re.search(r"^\.target (sm_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            said = run_tool([ptxas, "-v", f"-arch={target[1] if target else 'sm_90'}", str(file), "-o", os.devnull])
            for name, stores, loads in parse_spills(said):
                found[plain_name(name)] = stores, loads
    return found, "" if found else f"ptxas says nothing about spills in {library.name}"


def parse_spills(said: str) -> list[tuple[str, int, int]]:
    """(mangled name, bytes of spill stores, of spill loads) from `ptxas -v`."""
    pattern = re.compile(
        r"Function properties for (\S+)\s+(?:ptxas info\s*:)?\s*\d+ bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads"
    )
    return [(name, int(stores), int(loads)) for name, stores, loads in pattern.findall(said)]


def plain_name(mangled: str) -> str:
    """`certify<float>` for `_ZN4topw7certifyIfEEvNS_4CallE`; other names unchanged."""
    match = re.match(r"_ZN4topw\d+([a-z_]+?)(?:I(\w+?)EE)?(?:EN|Ev|vN|$)", mangled)
    if match is None:
        return mangled
    types = {"f": "float", "NS_7Float16": "Float16", "NS_8Bfloat16": "Bfloat16"}
    return match[1] if match[2] is None else f"{match[1]}<{types.get(match[2].removesuffix('E'), match[2])}>"


def find_tool(name: str) -> str | None:
    """A CUDA program beside nvcc, on PATH or in Triton's package; else None."""
    from topw_deploy.errors import PluginError
    from topw_deploy.plugins import nvcc

    try:
        beside = nvcc.find_toolkit().nvcc.resolve().parent / name
        if beside.is_file():
            return str(beside)
    except PluginError:
        pass
    found = shutil.which(name)
    if found is not None:
        return found
    spec = find_spec("triton")
    for folder in [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations:
        carried = Path(folder) / "backends" / "nvidia" / "bin" / name
        if carried.is_file():
            return str(carried)
    return None


def run_tool(command: list[str], folder: Path | None = None) -> str:
    """Run a command in `folder`. Returns its output. Raises RuntimeError with the output if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_LIMIT)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout + done.stderr

"""Which native libraries and GPUs are present and fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from topw_deploy.plugins import driver, shared_library
from topw_deploy.plugins.shared_library import library_path


@dataclass(frozen=True)
class CpuStatus:
    """The CPU library.

    why_none: why path and instruction_set are None, as a clause; "" if they are not.
    """

    path: str | None
    instruction_set: str | None
    why_none: str


@dataclass(frozen=True)
class CudaStatus:
    """The CUDA library.

    why_unused: why no GPU here can use it, as a clause; "" if one can.
    """

    path: str | None
    architectures: tuple[int, ...]
    why_unused: str


@dataclass(frozen=True)
class Status:
    """The native libraries and the GPUs of this machine."""

    cpu: CpuStatus
    cuda: CudaStatus
    driver: driver.Driver


def read_status() -> Status:
    found = driver.query_driver()
    return Status(cpu_status(), cuda_status(found), found)


def cpu_status() -> CpuStatus:
    path = library_path()
    if path is None:
        return CpuStatus(None, None, shared_library.why_absent())
    try:
        return CpuStatus(str(path), shared_library.load(path).instruction_set, "")
    except OSError as error:
        return CpuStatus(None, None, _load_failure(path, "cpu", error))


def _load_failure(path: Path, kind: shared_library.Kind, error: OSError) -> str:
    named = shared_library.variable_selecting(path, kind)
    return f"{f'the library of {named}' if named else 'it'} does not load ({error})"


def cuda_status(found: driver.Driver) -> CudaStatus:
    path = library_path("cuda")
    if path is None:
        return CudaStatus(None, (), shared_library.why_absent("cuda"))
    try:
        library = shared_library.load_cuda(path)
    except OSError as error:
        return CudaStatus(None, (), _load_failure(path, "cuda", error))
    unserved = [device for device in found.devices if not library.can_run_on(device.architecture)]
    why = found.why_none
    if unserved and len(unserved) == len(found.devices):
        number = unserved[0].architecture
        why = f"it has no code for sm_{number} (run: topw plugins build --cuda --arch {number})"
    return CudaStatus(str(path), library.architectures, why)


def status_lines(status: Status) -> list[str]:
    """The status as lines of text."""
    cpu, cuda = status.cpu, status.cuda
    return [
        f"CPU library   {cpu.path}, {cpu.instruction_set}" if cpu.path else f"CPU library   none: {cpu.why_none}",
        cuda_line("CUDA library  ", cuda),
        *driver_lines(status.driver),
    ]


def cuda_line(title: str, cuda: CudaStatus) -> str:
    if cuda.path is None:
        return f"{title}none: {cuda.why_unused}"
    state = f", unused: {cuda.why_unused}" if cuda.why_unused else ""
    return f"{title}{cuda.path}, {' '.join(f'sm_{number}' for number in cuda.architectures)}{state}"


def driver_lines(found: driver.Driver) -> list[str]:
    if found.why_none:
        return [f"GPU           none: {found.why_none}"]
    return [f"GPU {number}         {d.name}, sm_{d.architecture}" for number, d in enumerate(found.devices)] + [
        f"driver        runs CUDA {found.cuda}"
    ]

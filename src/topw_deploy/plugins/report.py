"""What native libraries there are, which GPUs, and whether the one is for the other: for people who ask why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from topw_deploy.plugins import driver, shared_library
from topw_deploy.plugins.shared_library import library_path
from topw_deploy.plugins.tensorrt import build as tensorrt_build


@dataclass(frozen=True)
class CpuLibrary:
    """path and instruction_set: None where there is no library; why_none then says why, as a clause."""

    path: str | None
    instruction_set: str | None
    why_none: str


@dataclass(frozen=True)
class CudaLibrary:
    """path: None where there is no library that loads. architectures: what it was compiled for, 87 is sm_87.
    why_unused: why no GPU of this machine is served by it, as a clause; empty where one is."""

    path: str | None
    architectures: tuple[int, ...]
    why_unused: str


@dataclass(frozen=True)
class TensorRTLibrary:
    """The plugin for hosts in C++. path: None where there is no such file; why_none then says why, as a clause. It is
    not loaded: only TensorRT can."""

    path: str | None
    why_none: str


@dataclass(frozen=True)
class Report:
    cpu: CpuLibrary
    cuda: CudaLibrary
    driver: driver.Driver
    tensorrt: TensorRTLibrary


def look() -> Report:
    """Load what there is, and ask the driver."""
    found = driver.look()
    return Report(cpu_library(), cuda_library(found), found, tensorrt_library())


def cpu_library() -> CpuLibrary:
    path = library_path()
    if path is None:
        return CpuLibrary(None, None, shared_library.why_absent())
    try:
        return CpuLibrary(str(path), shared_library.load(path).instruction_set, "")
    except OSError as error:
        return CpuLibrary(None, None, _unloadable(path, "cpu", error))


def _unloadable(path: Path, kind: shared_library.Kind, error: OSError) -> str:
    """As a clause, with the variable that named the library where one did."""
    named = shared_library.variable_naming(path, kind)
    return f"{f'the library that {named} names' if named else 'it'} does not load ({error})"


def cuda_library(found: driver.Driver) -> CudaLibrary:
    path = library_path("cuda")
    if path is None:
        return CudaLibrary(None, (), shared_library.why_absent("cuda"))
    try:
        library = shared_library.load_cuda(path)
    except OSError as error:
        return CudaLibrary(None, (), _unloadable(path, "cuda", error))
    unserved = [device for device in found.devices if not library.serves(device.architecture)]
    why = found.why_none
    if unserved and len(unserved) == len(found.devices):
        number = unserved[0].architecture
        why = f"it has no code for sm_{number} (run: topw plugins build --cuda --arch {number})"
    return CudaLibrary(str(path), library.architectures, why)


def tensorrt_library() -> TensorRTLibrary:
    path = tensorrt_build.installed()
    if path is None:
        return TensorRTLibrary(
            None, "it was not built here (`topw plugins build --tensorrt-root DIR` makes it, for C++)"
        )
    if not path.is_file():
        return TensorRTLibrary(None, f"{tensorrt_build.VARIABLE} names {path}, which is no file")
    return TensorRTLibrary(str(path), "")


def lines(report: Report) -> list[str]:
    """The report as text."""
    cpu, cuda = report.cpu, report.cuda
    return [
        f"CPU library   {cpu.path}, {cpu.instruction_set}" if cpu.path else f"CPU library   none: {cpu.why_none}",
        cuda_line("CUDA library  ", cuda),
        f"TRT library   {report.tensorrt.path or f'none: {report.tensorrt.why_none}'}",
        *driver_lines(report.driver),
    ]


def cuda_line(title: str, cuda: CudaLibrary) -> str:
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

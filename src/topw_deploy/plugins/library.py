"""The native libraries and the NVIDIA driver: find, load and report them.

The CUDA library includes the CPU operator and TensorRT's plugin. Libraries come from the package, or from
TOPW_NATIVE_LIBRARY and TOPW_CUDA_LIBRARY. They never come from a model's folder, which holds only data.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, overload

from topw_deploy.errors import ParameterError, PluginError

Kind: TypeAlias = Literal["cpu", "cuda"]

ABI_VERSION = 4
"""TOPW_ABI_VERSION of topw.h, which a library must have."""
CUDA_ABI_VERSION = 4
"""TOPW_CUDA_ABI_VERSION of topw_cuda.h, which a CUDA library must have."""

LIBRARY_NAME = {"darwin": "libtopw.dylib", "win32": "topw.dll"}.get(sys.platform, "libtopw.so")
PACKAGED = Path(__file__).with_name(LIBRARY_NAME)
PACKAGED_CUDA = Path(__file__).with_name("libtopw_cuda.so")

_JETSON = {87, 110}  # architectures of Jetsons, which run no code of other architectures

_VARIABLES: dict[Kind, str] = {"cpu": "TOPW_NATIVE_LIBRARY", "cuda": "TOPW_CUDA_LIBRARY"}


def library_path(kind: Kind = "cpu") -> Path | None:
    """The library to use, or None (see `why_absent`). TOPW_NATIVE=0 disables both kinds."""
    return None if why_absent(kind) else _selected_path(kind)


def why_absent(kind: Kind = "cpu") -> str:
    """Why `library_path` is None, as a clause; "" if it is not."""
    if os.environ.get("TOPW_NATIVE") == "0":
        return "TOPW_NATIVE=0 disables it"
    path = _selected_path(kind)
    if path.is_file():
        return ""
    if path is not _packaged_path(kind):
        return f"{_VARIABLES[kind]} is {path}, which is not a file"
    if kind == "cuda":
        return f"it was not built here ({path.name} is not in {path.parent}; `topw plugins build --cuda` builds it)"
    return f"this installation was built without it ({path.name} is not in {path.parent})"


def _selected_path(kind: Kind) -> Path:
    given = os.environ.get(_VARIABLES[kind])
    return Path(given).absolute() if given else _packaged_path(kind)


def _packaged_path(kind: Kind) -> Path:
    return PACKAGED_CUDA if kind == "cuda" else PACKAGED


class Library:
    """The loaded library with onnxruntime's operator. Raises OSError if the file is not such a library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle = ctypes.CDLL(str(path))
        try:
            version = handle.topw_abi_version()
            self._show = handle.topw_ort_show
            self._kernels = handle.topw_ort_kernels
            self._knows = handle.topw_ort_knows_table_form
            self._set = handle.topw_instruction_set
        except AttributeError:
            raise OSError(f"{path} is not a library of topw_deploy") from None
        if version != ABI_VERSION:
            raise OSError(f"{path} has interface version {version}, but {ABI_VERSION} is needed")
        self._show.argtypes, self._show.restype = [ctypes.c_int], None
        self._kernels.restype = ctypes.c_int64
        self._knows.argtypes = [ctypes.c_char_p]
        self._set.restype = ctypes.c_char_p
        requested = os.environ.get("TOPW_INSTRUCTION_SET")
        # The library itself would silently use its best instruction set.
        if requested and requested not in (self.instruction_set, "generic"):
            raise OSError(
                f"TOPW_INSTRUCTION_SET is {requested!r}, which this processor or {path.name} does not support"
            )

    @property
    def instruction_set(self) -> str:
        """The instruction set that its loops use on this processor: `avx512`, `avx2`, `neon` or `generic`."""
        return str(self._set().decode("ascii"))

    def supports(self, table_form: str) -> bool:
        """Whether the operator supports the table form ("" for no table)."""
        return not table_form or bool(self._knows(table_form.encode("utf-8")))

    @property
    def assigned_nodes(self) -> int:
        """The number of nodes that sessions of this thread have assigned to the operator."""
        return int(self._kernels())

    def set_visible(self, is_visible: bool) -> None:
        """Show the operator to sessions that this thread opens from now on, or hide it."""
        self._show(int(is_visible))


class CudaLibrary(Library):
    """The loaded CUDA library; needs no driver. Raises OSError if the file is not such a library.

    architectures: those of its code, ascending; 87 for sm_87. The library also has PTX of the last one.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        handle = ctypes.CDLL(str(path))
        try:
            version = handle.topw_cuda_abi_version()
            architectures = handle.topw_cuda_architectures
        except AttributeError:
            raise OSError(f"{path} has no CUDA kernels") from None
        if version != CUDA_ABI_VERSION:
            raise OSError(f"{path} has CUDA interface version {version}, but {CUDA_ABI_VERSION} is needed")
        architectures.restype = ctypes.c_char_p
        self.architectures = tuple(int(number) for number in architectures().decode("ascii").split("."))

    def can_run_on(self, architecture: int) -> bool:
        """Whether the library has code or PTX for a GPU of this architecture."""
        return GpuCode(frozenset(self.architectures), frozenset(self.architectures[-1:])).runs_on(architecture)

    def missing_code(self, devices: Sequence[Device]) -> str:
        """Why none of `devices` can run the library, as a clause; "" if one can, or if there is none."""
        if not devices or any(self.can_run_on(device.architecture) for device in devices):
            return ""
        number = devices[0].architecture
        return f"{self.path.name} has no code for sm_{number} (run `topw plugins build --cuda --arch {number}`)"


_loaded: dict[Path, Library] = {}


def load(path: Path) -> Library:
    """The library at `path`, loaded once per process. Raises OSError."""
    if path not in _loaded:
        _loaded[path] = Library(path)
    return _loaded[path]


def load_cuda(path: Path) -> CudaLibrary:
    """The CUDA library at `path`, loaded once per process. Raises OSError."""
    found = _loaded.get(path)
    if not isinstance(found, CudaLibrary):
        _loaded[path] = found = CudaLibrary(path)
    return found


@overload
def load_selected(kind: Literal["cuda"]) -> tuple[CudaLibrary | None, str]: ...
@overload
def load_selected(kind: Kind) -> tuple[Library | None, str]: ...


def load_selected(kind: Kind) -> tuple[Library | None, str]:
    """Load the library to use. Returns the library or None, and in that case the reason as a clause."""
    path = library_path(kind)
    if path is None:
        return None, why_absent(kind)
    try:
        return (load_cuda(path) if kind == "cuda" else load(path)), ""
    except OSError as error:
        which = "the CUDA library" if kind == "cuda" else "the native library"
        if named := os.environ.get(_VARIABLES[kind]):
            which += f" of {_VARIABLES[kind]}={named!r}"
        return None, f"{which} does not load ({error})"


@contextmanager
def hide_operators() -> Iterator[None]:
    """Hide the operators from sessions that this thread opens in the block.

    onnxruntime can neither copy session options that have a registered operator, nor remove the operator from them.
    """
    libraries = list(_loaded.values())
    for library in libraries:
        library.set_visible(False)
    try:
        yield
    finally:
        for library in libraries:
            library.set_visible(True)


# ---- the architectures of GPU code, the driver and its GPUs

_FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)  # magic number, version, size of the header
_FATBIN_PTX, _FATBIN_CODE = 1, 2  # kinds of a fatbin's entries
_ARCHITECTURE_AT = 28  # bytes behind the start of an entry


@dataclass(frozen=True)
class GpuCode:
    """The architectures for which a library has machine code and PTX; 87 for sm_87."""

    code: frozenset[int]
    ptx: frozenset[int]

    def runs_on(self, architecture: int) -> bool:
        """Whether a GPU of this architecture can run the library.

        A driver compiles PTX for all later architectures. A GPU also runs code for older architectures of its
        generation, except that Jetsons run only their own, and no other GPU runs theirs.
        """
        if architecture in self.code or any(architecture >= number for number in self.ptx):
            return True
        older = {number for number in self.code if number // 10 == architecture // 10 and number < architecture}
        return architecture not in _JETSON and bool(older - _JETSON)


def read_gpu_code(path: Path) -> GpuCode:
    """The architectures of the code in a library that nvcc linked, read from its fatbins without loading it."""
    kinds: dict[int, set[int]] = {_FATBIN_PTX: set(), _FATBIN_CODE: set()}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_FATBIN)
        while start != -1:
            entry = start + len(_FATBIN) + 8
            end = min(entry + struct.unpack_from("<Q", data, entry - 8)[0], len(data))
            while entry + _ARCHITECTURE_AT + 4 <= end:
                kind, _, header, payload = struct.unpack_from("<HHIQ", data, entry)
                (architecture,) = struct.unpack_from("<I", data, entry + _ARCHITECTURE_AT)
                kinds.setdefault(kind, set()).add(architecture)
                entry += max(header + payload, _ARCHITECTURE_AT)
            start = data.find(_FATBIN, end)
    return GpuCode(frozenset(kinds[_FATBIN_CODE]), frozenset(kinds[_FATBIN_PTX]))


DRIVER_NAME = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NO_DEVICE = 100


@dataclass(frozen=True)
class Device:
    """A GPU's name and architecture (87 for sm_87)."""

    name: str
    architecture: int


@dataclass(frozen=True)
class Driver:
    """The driver's version and GPUs.

    cuda: the newest CUDA version that the driver supports, such as "13.0"; None without a driver.
    devices: visible GPUs.
    why_none: why `devices` is empty, as a clause; "" if it is not.
    """

    cuda: str | None
    devices: tuple[Device, ...]
    why_none: str


def query_driver() -> Driver:
    """Query the driver's version and GPUs. Without a driver or a GPU, the result says why."""
    try:
        driver = ctypes.CDLL(DRIVER_NAME)
    except OSError:
        return Driver(None, (), f"there is no NVIDIA driver ({DRIVER_NAME} was not found)")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    code = driver.cuInit(0)
    if code:
        what = "sees no GPU" if code == _NO_DEVICE else f"does not start (CUDA error {code})"
        return Driver(cuda, (), f"the NVIDIA driver {what}")
    devices = _read_devices(driver)
    return Driver(cuda, devices, "" if devices else "the NVIDIA driver sees no GPU")


def _read_devices(driver: ctypes.CDLL) -> tuple[Device, ...]:
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for number in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetName(name, len(name), device)
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        found.append(Device(name.value.decode("utf-8", "replace"), 10 * major.value + minor.value))
    return tuple(found)


ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 110, 120, 121)
"""The default targets of a library: sm_75 (Turing) to sm_121, including Jetson's sm_87 and sm_110."""

NATIVE = "native"
"""The GPUs of this machine, as in nvcc's -arch=native."""


def parse_architectures(text: str) -> tuple[str, ...]:
    """Parse a list of architectures, separated by commas, semicolons or spaces. Each becomes "87" or NATIVE.

    Raises ParameterError for anything else.
    """
    found = []
    for word in re.split(r"[,;\s]+", text.strip(",; \t\n")):
        number = re.fullmatch(rf"(?:sm_|compute_)?(\d{{2,3}})|(\d{{1,2}})\.(\d)|({NATIVE})", word)
        if number is None:
            known = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
            raise ParameterError(
                f"{word!r} is not an architecture; write 87, sm_87, 8.7 or {NATIVE} (this machine's GPU). Known: "
                f"{known}."
            )
        found.append("".join(filter(None, number.groups())))
    return tuple(found)


def resolve_architectures(names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the architectures `names`, ascending; NATIVE is those of this machine's GPUs.

    Raises PluginError for NATIVE without a GPU.
    """
    numbers = {int(name) for name in names if name != NATIVE}
    if NATIVE in names:
        found = query_driver()
        if not found.devices:
            raise PluginError(
                f"{NATIVE!r} means the GPU of this machine, but {found.why_none}; name the architecture, such as sm_87."
            )
        numbers |= {device.architecture for device in found.devices}
    return tuple(sorted(numbers))


# ---- reports


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
    driver: Driver


def read_status() -> Status:
    """Load the libraries to use, and query the driver."""
    driver = query_driver()
    native, why = load_selected("cpu")
    cpu = CpuStatus(None, None, why) if native is None else CpuStatus(str(native.path), native.instruction_set, "")
    gpus, why = load_selected("cuda")
    if gpus is None:
        return Status(cpu, CudaStatus(None, (), why), driver)
    why = driver.why_none or gpus.missing_code(driver.devices)
    return Status(cpu, CudaStatus(str(gpus.path), gpus.architectures, why), driver)


def status_lines(status: Status) -> list[str]:
    """The status as lines of text."""
    cpu, cuda, driver = status.cpu, status.cuda, status.driver
    lines = [f"CPU library   {cpu.path}, {cpu.instruction_set}" if cpu.path else f"CPU library   none: {cpu.why_none}"]
    if cuda.path is None:
        lines.append(f"CUDA library  none: {cuda.why_unused}")
    else:
        state = f", unused: {cuda.why_unused}" if cuda.why_unused else ""
        lines.append(f"CUDA library  {cuda.path}, {' '.join(f'sm_{number}' for number in cuda.architectures)}{state}")
    if driver.why_none:
        return [*lines, f"GPU           none: {driver.why_none}"]
    lines += [f"GPU {number}         {each.name}, sm_{each.architecture}" for number, each in enumerate(driver.devices)]
    return [*lines, f"driver        runs CUDA {driver.cuda}"]

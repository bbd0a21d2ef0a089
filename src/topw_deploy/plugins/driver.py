"""Query the NVIDIA driver's version and GPUs, without a CUDA toolkit or package, and parse names of architectures.

nvcc, CMake and PyTorch write architectures as 87, sm_87, compute_87, 8.7 or `native`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass

from topw_deploy.errors import ParameterError, PluginError

LIBRARY = "libcuda.so.1"
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
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return Driver(None, (), f"there is no NVIDIA driver ({LIBRARY} was not found)")
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
    words = re.split(r"[,;\s]+", text.strip(",; \t\n"))
    return tuple(map(_parse_architecture, words))


def _parse_architecture(word: str) -> str:
    if word == NATIVE:
        return NATIVE
    number = re.fullmatch(r"(?:sm_|compute_)?(\d{2,3})|(\d{1,2})\.(\d)", word)
    if number is None:
        known = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
        raise ParameterError(
            f"{word!r} is not an architecture; write 87, sm_87, 8.7 or {NATIVE} (this machine's GPU). Known: {known}."
        )
    return number[1] or number[2] + number[3]


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

"""The NVIDIA driver's version and GPUs, without a CUDA toolkit or package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NO_DEVICE = 100


@dataclass(frozen=True)
class Device:
    """A GPU's name and architecture (87 for sm_87)."""

    name: str
    architecture: int


@dataclass(frozen=True)
class Driver:
    """The driver's answers.

    cuda: newest supported version, such as "13.0"; None without a driver.
    devices: visible GPUs.
    why_none: why there are none, as a clause, or "".
    """

    cuda: str | None
    devices: tuple[Device, ...]
    why_none: str


def look() -> Driver:
    """Query the driver's version and GPUs."""
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
    devices = _devices(driver)
    return Driver(cuda, devices, "" if devices else "the NVIDIA driver sees no GPU")


def _devices(driver: ctypes.CDLL) -> tuple[Device, ...]:
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for number in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetName(name, len(name), device)
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        found.append(Device(name.value.decode("utf-8", "replace"), 10 * major.value + minor.value))
    return tuple(found)

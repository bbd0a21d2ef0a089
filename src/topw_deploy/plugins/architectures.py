"""GPU architectures as nvcc, CMake and PyTorch write them: 87, sm_87, compute_87, 8.7, `native`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from topw_deploy.errors import ParameterError, PluginError
from topw_deploy.plugins import driver

ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 110, 120, 121)
"""The default targets of a library: sm_75 (Turing) to sm_121, including Jetson's sm_87 and sm_110."""

NATIVE = "native"
"""The GPUs of this machine, as in nvcc's -arch=native."""


def parse(text: str) -> tuple[str, ...]:
    """Split a list at commas, semicolons or spaces into "87" or NATIVE. Raises ParameterError for other words."""
    words = re.split(r"[,;\s]+", text.strip(",; \t\n"))
    return tuple(map(_one, words))


def _one(word: str) -> str:
    if word == NATIVE:
        return NATIVE
    number = re.fullmatch(r"(?:sm_|compute_)?(\d{2,3})|(\d{1,2})\.(\d)", word)
    if number is None:
        known = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
        raise ParameterError(
            f"{word!r} is not an architecture; write 87, sm_87, 8.7 or {NATIVE} (this machine's GPU). Known: {known}."
        )
    return number[1] or number[2] + number[3]


def resolve(names: Sequence[str]) -> tuple[int, ...]:
    """Architecture numbers, ascending. Raises PluginError for NATIVE without a GPU."""
    numbers = {int(name) for name in names if name != NATIVE}
    if NATIVE in names:
        found = driver.look()
        if not found.devices:
            raise PluginError(
                f"{NATIVE!r} means the GPU of this machine, but {found.why_none}; name the architecture, such as sm_87."
            )
        numbers |= {device.architecture for device in found.devices}
    return tuple(sorted(numbers))

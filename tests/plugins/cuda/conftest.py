from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from benchmarks.emulated import EmulatedKernel, built, compiled

from topw_deploy.plugins import build


@pytest.fixture(scope="session")
def emulated_library(request: pytest.FixtureRequest) -> Path:
    """The kernels compiled as C++ over fibres, once for the same sources; skipped without a compiler."""
    try:
        build.find_compiler()
    except build.NotBuiltError as reason:
        pytest.skip(f"no emulated kernels: {reason}")
    assert request.config.cache is not None
    return built(request.config.cache.mkdir("emulated"))


@pytest.fixture
def kernel(emulated_library: Path) -> EmulatedKernel:
    """The emulated kernels with small blocks, of which there are few at once."""
    opened = EmulatedKernel(emulated_library)
    opened.emulate(seed=1, threads=64, blocks=3)
    return opened


@pytest.fixture(scope="session")
def probes(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels of probes.cu."""
    try:
        build.find_compiler()
    except build.NotBuiltError as reason:
        pytest.skip(f"no emulated kernels: {reason}")
    assert request.config.cache is not None
    source = Path(__file__).with_name("probes.cu")
    library = ctypes.CDLL(str(compiled(request.config.cache.mkdir("emulated"), [source])))
    library.probe_settings.argtypes = (ctypes.c_uint64, ctypes.c_uint32)
    library.probe_error.restype = ctypes.c_char_p
    library.probe_settings(1, 4)
    return library

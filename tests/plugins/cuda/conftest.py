from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.plugins.cuda.certified_rows import native_kernel
from tests.support.cuda_kernel import EmulatedKernel, compiled
from tests.support.kernel import Kernel
from topw_deploy.plugins import compile_native


@pytest.fixture
def kernel(emulated_library: Path) -> EmulatedKernel:
    """The emulated kernels with few, small blocks."""
    opened = EmulatedKernel(emulated_library)
    opened.emulate(seed=1, threads=64, blocks=3)
    return opened


@pytest.fixture(scope="session")
def probes(request: pytest.FixtureRequest) -> ctypes.CDLL:
    try:
        compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(f"no emulated kernels: {reason}")
    assert request.config.cache is not None
    path = compiled(request.config.cache.mkdir("emulated"), [Path(__file__).with_name("probes.cu")])
    library = ctypes.CDLL(str(path))
    library.probe_error.restype = ctypes.c_char_p
    library.probe_settings.argtypes = (ctypes.c_uint64, ctypes.c_uint32)
    library.probe_settings(1, 4)
    return library


@pytest.fixture(scope="session")
def cpu() -> Kernel:
    """The native sampler, to compare with."""
    found = native_kernel()
    if found is None:
        pytest.skip("no native sampler to compare with")
    return found

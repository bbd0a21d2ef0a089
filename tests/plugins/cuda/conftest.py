from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.emulated import EmulatedKernel, built

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

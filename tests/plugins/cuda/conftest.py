from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cuda_kernel import EmulatedKernel


@pytest.fixture
def kernel(emulated_library: Path) -> EmulatedKernel:
    """The emulated kernels with few, small blocks."""
    opened = EmulatedKernel(emulated_library)
    opened.emulate(seed=1, threads=64, blocks=3)
    return opened

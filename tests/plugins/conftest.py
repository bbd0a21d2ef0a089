from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.native_cases import instruction_sets, opened
from tests.support.samples import slow
from topw_deploy.plugins import library
from topw_deploy.plugins.library import library_path


@pytest.fixture(scope="session")
def native_library() -> Path:
    """Skips the test if the library is not built."""
    path = library_path()
    if path is None:
        pytest.skip(f"no native sampler: {library.why_absent()}")
    return path


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return opened(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=("avx512", "avx2", slow("generic")))
def each_kernel(request: pytest.FixtureRequest, kernel: Kernel) -> Kernel:
    sets = instruction_sets(kernel)
    name = sets[-1] if request.param == "generic" else request.param
    if name not in sets:
        pytest.skip(f"this processor has no {name}")
    kernel.use_instruction_set(name)
    return kernel

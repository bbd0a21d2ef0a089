from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cuda_kernel import EmulatedKernel, built
from tests.support.kernel import Kernel
from tests.support.native_cases import instruction_sets, opened
from tests.support.samples import slow
from topw_deploy.plugins import compile_native, library
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


def use_instruction_set(kernel: Kernel, name: str) -> Kernel:
    sets = instruction_sets(kernel)
    name = sets[-1] if name == "generic" else name
    if name not in sets:
        pytest.skip(f"this processor has no {name}")
    kernel.use_instruction_set(name)
    return kernel


@pytest.fixture(params=("avx512", "avx2", slow("generic")))
def each_kernel(request: pytest.FixtureRequest, kernel: Kernel) -> Kernel:
    return use_instruction_set(kernel, request.param)


@pytest.fixture(scope="session")
def emulated_library(request: pytest.FixtureRequest) -> Path:
    """The CUDA kernels compiled as C++ over fibres; skipped without a compiler."""
    try:
        compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(f"no emulated kernels: {reason}")
    assert request.config.cache is not None
    return built(request.config.cache.mkdir("emulated"))


@pytest.fixture(params=("avx512", "avx2", slow("generic"), "cuda"))
def any_kernel(request: pytest.FixtureRequest) -> Kernel | EmulatedKernel:
    """The native sampler with an instruction set, or the emulated CUDA kernels with few, small blocks."""
    if request.param != "cuda":
        return use_instruction_set(request.getfixturevalue("kernel"), request.param)
    emulated = EmulatedKernel(request.getfixturevalue("emulated_library"))
    emulated.emulate(seed=1, threads=64, blocks=3)
    return emulated

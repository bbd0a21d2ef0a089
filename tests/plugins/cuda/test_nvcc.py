"""NVIDIA's compilers compile the kernels for every GPU; the library loads without one."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.function_cases import Wanted, feeds, open_model, run
from tests.support.rows import random_case
from tests.support.toy_model import Toy, export
from topw_deploy.plugins import compile_native, library, nvcc
from topw_deploy.runtime import TopWModel
from topw_deploy.runtime.ort import native
from topw_deploy.sampling import TopWOptions

from .tools import ARCHITECTURES, CUDA12, HERE, RuntimeCompiler, digest, home, packages

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def toolkit() -> nvcc.Toolkit:
    with pytest.MonkeyPatch.context() as patch:
        _use(patch)
        return nvcc.find_toolkit()


def _use(patch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        patch.delenv(name, raising=False)
    folder = home()
    if folder is not None:
        patch.setenv("CUDA_HOME", str(folder))
    try:
        compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def cuda_library(toolkit: nvcc.Toolkit, request: pytest.FixtureRequest) -> Path:
    """The library, compiled for all architectures; warnings of nvcc are errors."""
    assert request.config.cache is not None
    key = digest(toolkit.version, nvcc.FLAGS, compile_native.FLAGS, ARCHITECTURES)
    path = request.config.cache.mkdir("nvcc") / key / "libtopw_cuda.so"
    if not path.is_file():
        with pytest.MonkeyPatch.context() as patch:
            _use(patch)
            nvcc.compile_cuda(path, ARCHITECTURES)
    return path


def test_one_library_holds_code_for_every_gpu(toolkit: nvcc.Toolkit, cuda_library: Path) -> None:
    found = library.load_cuda(cuda_library)
    assert found.architectures == nvcc.choose_architectures(toolkit, ARCHITECTURES)
    code = library.read_gpu_code(cuda_library)
    assert (code.code, code.ptx) == (set(found.architectures), {found.architectures[-1]})
    if not ARCHITECTURES and toolkit.version.startswith("13."):
        assert found.architectures == nvcc.ARCHITECTURES


# The most registers, bytes of stack (arrays and spilled registers) and bytes of shared memory of each kernel. With more
# registers, blocks of the largest size could not run. On sm_75 to sm_120, nvcc 13.0 gives the kernels 144 to 192 and
# 1,904 to 2,368 bytes of stack.
LIMITS = {"certify": (64, 200, 7168), "geometry": (128, 2400, 5120)}


def test_no_kernel_needs_more_registers_stack_or_shared_memory(cuda_library: Path) -> None:
    program = packages("tools", "cu13/bin/cuobjdump") / "cu13" / "bin" / "cuobjdump"
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    words = [str(program), "--dump-resource-usage", str(cuda_library)]
    listed = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}).stdout
    kernels = re.findall(r"Function _ZN4topw\d+(certify|geometry)\S*:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", listed)
    assert len(kernels) == 4 * len(library.load_cuda(cuda_library).architectures)  # certify for three types of logits
    for name, *found in kernels:
        assert all(int(value) <= limit for value, limit in zip(found, LIMITS[name], strict=True)), (name, found)


def test_the_library_needs_no_cuda_and_no_driver_to_load(cuda_library: Path) -> None:
    found = library.load_cuda(cuda_library)
    assert found.architectures
    if shutil.which("readelf"):
        words = ["readelf", "-d", str(cuda_library)]
        dynamic = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        needed = {line.split("[")[1].split(".so")[0] for line in dynamic.splitlines() if "NEEDED" in line}
        systems = {"libc", "libm", "libdl", "librt", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
        assert needed <= systems


def test_a_launch_without_a_driver_is_an_error_with_a_name(cuda_library: Path) -> None:
    library_ = ctypes.CDLL(str(cuda_library))
    if library.query_driver().devices:
        pytest.skip("there is a GPU")
    library_.topw_cuda_error.restype = ctypes.c_char_p
    text = library_.topw_cuda_error(35)
    assert b"driver" in text


def test_on_the_cpu_its_operator_answers_as_the_cpus_library_does(cuda_library: Path, native_library: Path) -> None:
    wanted = Wanted(TopWOptions(top_m=40), mass=True, keep_mask=True)
    rng = np.random.default_rng(0)
    inputs = feeds([random_case(rng, wanted.vocab_size) for _ in range(40)], edits=2)
    found = run(open_model(wanted.model(), cuda_library), inputs)
    for name, values in run(open_model(wanted.model(), native_library), inputs).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_options_that_one_library_registered_on_are_understood_by_the_other(
    cuda_library: Path, native_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPW_CUDA_LIBRARY", str(cuda_library))
    folder = export(tmp_path / "toy", Toy.random(0))
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(cuda_library))
    assert TopWModel.from_pretrained(folder, provider="cpu", session_options=options).sampler == "native"
    found, why = native.operator_library("CUDAExecutionProvider", "", options)
    assert (found, why) == (library.load_cuda(cuda_library), "")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(native_library))
    found, why = native.operator_library("CUDAExecutionProvider", "", options)
    assert found is None
    assert why == "the session options already have the CPU's operator and cannot take the GPU's; give new ones"


@pytest.mark.parametrize("architecture", CUDA12)
def test_the_device_code_also_compiles_with_cuda_12(architecture: str, request: pytest.FixtureRequest) -> None:
    """Of CUDA 12, packages bring only the run-time compiler."""
    compiler = RuntimeCompiler()
    assert compiler.version == "12.6"
    if ARCHITECTURES and architecture != CUDA12[-1]:
        pytest.skip(f"TOPW_TEST_ARCHITECTURES leaves {architecture} out")
    assert request.config.cache is not None
    done = request.config.cache.mkdir("nvrtc") / digest("12.6", architecture)
    if not done.is_file():
        code = compiler.compile(HERE / "jit" / "device_code.cu", architecture)
        for kernel in (b"certify", b"geometry"):
            assert kernel in code
        done.write_bytes(b"")

"""Find nvcc and choose architectures; cuda/test_nvcc.py compiles."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from topw_deploy.errors import PluginError
from topw_deploy.plugins import compile_native, library, nvcc

Invoke = Callable[..., object]
Install = Callable[..., Path]

NVCC = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  *--version*) echo "Cuda compilation tools, release 12.6, V12.6.85" ;;
  *--list-gpu-code*) printf 'sm_50\\nsm_75\\nsm_80\\nsm_86\\nsm_87\\nsm_89\\nsm_90\\n' ;;
  *--dryrun*) echo "#$ TOP=$here/.." >&2 ;;
  *) echo "kernel.cu(7): error: no such word" >&2; exit 2 ;;
esac
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put CUDA 12.6's nvcc under `root`, hiding others."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'empty'}:/usr/bin:/bin")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    nowhere = {name: str(tmp_path / "site") for name in ("purelib", "platlib")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: nowhere)
    monkeypatch.setattr(nvcc, "_USUAL_ROOT", tmp_path / "usual")

    def put(root: Path, script: str = NVCC) -> Path:
        for folder in ("bin", "lib64", "include"):
            (root / folder).mkdir(parents=True)
        (root / "bin" / "nvcc").write_text(script)
        (root / "bin" / "nvcc").chmod(0o755)
        (root / "lib64" / "libcudart_static.a").touch()
        (root / "include" / "cuda_runtime_api.h").touch()
        return root / "bin" / "nvcc"

    return put


def test_nvcc_is_taken_from_the_variable_the_path_the_environment_or_the_usual_place(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = install(tmp_path / "usual")
    assert nvcc.find_toolkit().nvcc == usual
    pips = install(tmp_path / "site" / "nvidia" / "cu13")
    assert nvcc.find_toolkit().nvcc == pips
    on_path = install(tmp_path / "path")
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert nvcc.find_toolkit().nvcc == on_path
    named = install(tmp_path / "named")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "named"))
    found = nvcc.find_toolkit()
    assert (found.nvcc, found.version) == (named, "12.6")
    assert found.architectures == (50, 75, 80, 86, 87, 89, 90)
    assert (found.libraries, found.headers) == (tmp_path / "named" / "lib64", tmp_path / "named" / "include")


def test_a_variable_that_names_no_toolkit_is_refused(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "usual")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(PluginError, match=r"CUDA_HOME is '.*nothing', which has no bin/nvcc; correct or unset it"):
        nvcc.find_toolkit()


def test_an_nvcc_without_the_static_runtime_or_of_another_kind_is_refused(install: Install, tmp_path: Path) -> None:
    compiler = install(tmp_path / "usual")
    (tmp_path / "usual" / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(PluginError, match=r"nvcc lacks libcudart_static.a; run: pip install"):
        nvcc.find_toolkit()
    compiler.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(PluginError, match="is not a supported nvcc"):
        nvcc.find_toolkit()


def test_the_architectures_are_all_that_nvcc_supports_or_the_requested_ones(install: Install, tmp_path: Path) -> None:
    install(tmp_path / "usual")
    toolkit = nvcc.find_toolkit()
    assert nvcc.choose_architectures(toolkit, ()) == (75, 80, 86, 87, 89, 90)
    assert nvcc.choose_architectures(toolkit, (90, 87, 90)) == (87, 90)
    for unknown in (110, 50):
        with pytest.raises(PluginError, match=rf"nvcc 12.6 does not compile .* sm_{unknown}, only for 75, 80"):
            nvcc.choose_architectures(toolkit, (87, unknown))
    with pytest.raises(PluginError, match=r"nvcc 9.2 compiles for none .* sm_75 or newer; install CUDA 11"):
        nvcc.choose_architectures(replace(toolkit, version="9.2", architectures=(50, 70)), ())


@pytest.mark.slow
def test_a_build_that_fails_says_where_and_leaves_the_library_that_was_there(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "usual")
    output = tmp_path / "lib.so"
    output.write_bytes(b"of an earlier build")
    said: list[str] = []
    with pytest.raises(PluginError, match=r"was not built: .*nvcc failed \(kernel.cu\(7\): error: no such word\)"):
        nvcc.compile_cuda(output, say=said.append)
    assert said[:1] == [f"nvcc 12.6 ({tmp_path / 'usual' / 'bin' / 'nvcc'}), sm_75, sm_80, sm_86, sm_87, sm_89, sm_90"]
    assert output.read_bytes() == b"of an earlier build"
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++")
    with pytest.raises(
        PluginError, match=r"nvcc needs a single program as its C\+\+ compiler, but CXX is \S+ -m ziglang"
    ):
        nvcc.compile_cuda(output)


@pytest.mark.parametrize(
    ("place", "reason"),
    [("file/lib.so", "Not a directory"), ("", "Is a directory"), ("/proc/lib.so", "No such file or directory")],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_compiled(
    install: Install, tmp_path: Path, place: str, reason: str
) -> None:
    install(tmp_path / "usual")
    (tmp_path / "file").write_bytes(b"")
    said: list[str] = []
    with pytest.raises(PluginError, match=rf"cannot be written \({reason}\); name another file with --output"):
        nvcc.compile_cuda(tmp_path / place, say=said.append)
    assert said == []
    with pytest.raises(compile_native.NotBuiltError, match="cannot be written"):
        compile_native.install_library(Path(__file__), tmp_path / "file" / "lib.so")


def test_a_library_runs_on_gpus_that_have_its_code_or_can_compile_its_ptx() -> None:
    found = library.CudaLibrary.__new__(library.CudaLibrary)
    found.architectures = (75, 80, 90)
    served = {number for number in (70, 75, 80, 86, 87, 89, 90, 100, 110, 121) if found.can_run_on(number)}
    assert served == {75, 80, 86, 89, 90, 100, 110, 121}  # a Jetson (87) runs only its own code
    found.architectures = (87, 120)
    assert [found.can_run_on(number) for number in (87, 89, 110, 120, 121)] == [True, False, False, True, True]
    without_ptx = library.GpuCode(frozenset({80, 89, 90}), frozenset())
    assert [without_ptx.runs_on(number) for number in (86, 87, 90, 100, 110)] == [True, False, True, False, False]


FAKE_DRIVER = """
extern "C" {
int cuDriverGetVersion(int *version) { *version = 12060; return 0; }
int cuInit(unsigned) { return INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int, int device) {
  const char *text = device ? "Second" : "Orin";
  while ((*name++ = *text++)) {}
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device ? 9 : 8) : attribute == 76 ? (device ? 0 : 7) : -1;
  return 0;
}
}
"""


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    try:
        compiler = compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(str(reason))

    def make(code: int, count: int) -> None:
        source, made = tmp_path / "driver.cpp", tmp_path / f"driver{code}_{count}.so"
        source.write_text(FAKE_DRIVER)
        defines = [f"-DINIT={code}", f"-DCOUNT={count}"]
        subprocess.run([*compiler, *defines, "-fPIC", "-shared", str(source), "-o", str(made)], check=True)
        monkeypatch.setattr(library, "DRIVER_NAME", str(made))

    return make


def test_the_driver_reports_its_version_and_its_gpus(fake_driver: Callable[[int, int], None]) -> None:
    fake_driver(0, 2)
    found = library.query_driver()
    assert found == library.Driver("12.6", (library.Device("Orin", 87), library.Device("Second", 90)), "")
    fake_driver(100, 0)
    assert library.query_driver() == library.Driver("12.6", (), "the NVIDIA driver sees no GPU")
    fake_driver(999, 0)
    assert library.query_driver().why_none == "the NVIDIA driver does not start (CUDA error 999)"


def test_the_report_says_why_a_library_serves_no_gpu_here(
    fake_driver: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_driver(0, 1)
    monkeypatch.setenv("TOPW_CUDA_LIBRARY", str(tmp_path / "nowhere.so"))
    assert (
        library.read_status().cuda.why_unused == f"TOPW_CUDA_LIBRARY is {tmp_path / 'nowhere.so'}, which is not a file"
    )
    (tmp_path / "other.so").write_bytes(b"\x7fELF and nothing more")
    monkeypatch.setenv("TOPW_CUDA_LIBRARY", str(tmp_path / "other.so"))
    named = f"the CUDA library of TOPW_CUDA_LIBRARY='{tmp_path / 'other.so'}' does not load ("
    assert library.read_status().cuda.why_unused.startswith(named)
    pretended = library.CudaLibrary.__new__(library.CudaLibrary)
    pretended.path, pretended.architectures = tmp_path / "other.so", (80, 90)
    monkeypatch.setattr(library, "load_cuda", lambda path: pretended)
    found = library.read_status()
    assert found.cuda.why_unused == "other.so has no code for sm_87 (run `topw plugins build --cuda --arch 87`)"
    assert library.status_lines(found)[1:] == [
        f"CUDA library  {tmp_path / 'other.so'}, sm_80 sm_90, unused: {found.cuda.why_unused}",
        "GPU 0         Orin, sm_87",
        "driver        runs CUDA 12.6",
    ]
    pretended.architectures = (80, 87)
    assert library.read_status().cuda.why_unused == ""

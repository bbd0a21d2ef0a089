"""Find and build the native library."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from topw_deploy.plugins import compile_native, library, nvcc
from topw_deploy.plugins.library import library_path

ROOT = Path(__file__).parents[2]


def need_setuptools() -> None:
    """Skip if setuptools is too old for setup.py. Not imported: the demo's corpus imports distutils, which prevents
    that."""
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"setuptools {version} is older than 77")


def test_the_library_comes_from_the_package_or_from_the_variable(
    native_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native_library == library.PACKAGED
    copy = Path(shutil.copy(native_library, tmp_path))
    monkeypatch.setenv("TOPW_NATIVE_LIBRARY", str(copy))
    assert library_path() == copy
    monkeypatch.setenv("TOPW_NATIVE", "0")
    assert library_path() is None


def test_an_instruction_set_that_is_not_there_is_refused_and_not_replaced_by_another(
    native_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPW_INSTRUCTION_SET", "generic")
    library.Library(native_library)
    monkeypatch.setenv("TOPW_INSTRUCTION_SET", "avx1024")
    with pytest.raises(OSError, match="TOPW_INSTRUCTION_SET is 'avx1024', which this processor or libtopw"):
        library.Library(native_library)


def needs_a_compiler() -> None:
    try:
        compile_native.find_compiler()
    except compile_native.NotBuiltError as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.long
def test_a_compiler_gives_a_library_that_needs_no_other_than_the_systems(tmp_path: Path) -> None:
    needs_a_compiler()
    compile_native.compile_native(tmp_path / compile_native.LIBRARY_NAME)
    assert library.Library(tmp_path / compile_native.LIBRARY_NAME).supports("Gather(axis=0)")
    if sys.platform == "linux" and shutil.which("readelf"):
        dynamic = subprocess.run(
            ["readelf", "-d", str(tmp_path / compile_native.LIBRARY_NAME)], capture_output=True, text=True, check=True
        ).stdout
        needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line]
        assert all(name.split(".so")[0] in ("libc", "libm", "ld-linux-x86-64", "ld-linux-aarch64") for name in needed)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/c++", "there is no such program"),
        ("false", "failed"),
        ("true", "wrote no library"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"fatal error: no disk\")'", "fatal error: no disk"),
    ],
)
def test_a_compiler_that_fails_leaves_no_library_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    (tmp_path / "lib.so").write_bytes(b"of an earlier build")
    with pytest.raises(compile_native.NotBuiltError, match=reason):
        compile_native.compile_native(tmp_path / "lib.so")
    assert not (tmp_path / "lib.so").exists()


def test_no_compiler_and_a_disabled_build_are_reasons_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(compile_native.NotBuiltError, match="no C\\+\\+ compiler was found"):
        compile_native.compile_native(tmp_path / "lib.so")
    monkeypatch.setenv("TOPW_BUILD_NATIVE", "0")
    with pytest.raises(compile_native.NotBuiltError, match="TOPW_BUILD_NATIVE=0"):
        compile_native.compile_native(tmp_path / "lib.so")


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "model", "*.so")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def wheel_of(tree: Path) -> tuple[str, list[str]]:
    need_setuptools()
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tree / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = [name.partition("/plugins/")[2] for name in archive.namelist() if "/plugins/" in name]
    wheel.unlink()
    return wheel.name.split("-", 2)[2].removesuffix(".whl"), names


@pytest.mark.long
def test_a_wheel_with_the_library_is_for_one_platform_and_one_without_for_all(
    source_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_a_compiler()
    tag, files = wheel_of(source_tree)
    assert tag.startswith("py3-none-")
    assert tag != "py3-none-any"
    assert compile_native.LIBRARY_NAME in files
    assert {"native/topw.h", "native/ort_node.cpp", "cuda/launch.cu"} <= set(files)  # for `topw plugins build`
    # An earlier build's library must not enter a wheel for all platforms.
    monkeypatch.setenv("CXX", "false")
    tag, files = wheel_of(source_tree)
    assert tag == "py3-none-any"
    assert compile_native.LIBRARY_NAME not in files
    assert "library.py" in files


@pytest.mark.slow
def test_the_source_distribution_has_every_file_that_the_library_is_made_from(source_tree: Path) -> None:
    need_setuptools()
    command = [sys.executable, "setup.py", "-q", "sdist"]
    done = subprocess.run(command, cwd=source_tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (archive,) = (source_tree / "dist").iterdir()
    with tarfile.open(archive) as files:
        packed = set(files.getnames())
    for folder in (compile_native.SOURCES, nvcc.SOURCES):
        here = {path.name for path in folder.iterdir() if path.is_file()}
        assert {Path(name).name for name in packed if f"/plugins/{folder.name}/" in name} == here

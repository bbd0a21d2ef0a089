"""Find the plugin's headers and compile it. Compiling needs NVIDIA's headers, in TENSORRT_ROOT."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from topw_deploy.cli.main import run, topw
from topw_deploy.errors import PluginError
from topw_deploy.plugins.tensorrt.compile import compile_tensorrt, find_headers

DIRECT = "#define NV_TENSORRT_MAJOR {} //!< major\n#define NV_TENSORRT_MINOR {}  //!< minor\n"
THROUGH = (
    "#define TRT_MAJOR_ENTERPRISE {}\n#define TRT_MINOR_ENTERPRISE {}\n"
    "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n#define NV_TENSORRT_MINOR TRT_MINOR_ENTERPRISE\n"
)


def headers(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "NvInferRuntime.h").write_text("")
    (folder / "NvInferVersion.h").write_text(text)
    return folder


@pytest.mark.parametrize("place", ["include", "include/x86_64-linux-gnu", "include/aarch64-linux-gnu", "."])
def test_headers_are_found_where_an_archive_or_a_package_puts_them(place: str, tmp_path: Path) -> None:
    folder = headers(tmp_path / "root" / place, DIRECT.format(10, 3))
    found, version = find_headers(tmp_path / "root")
    assert (found.resolve(), version) == (folder.resolve(), "10.3")


def test_a_version_is_read_through_another_macro(tmp_path: Path) -> None:
    headers(tmp_path / "include", THROUGH.format(11, 1))
    assert find_headers(tmp_path)[1] == "11.1"


@pytest.mark.parametrize(
    ("text", "said"),
    [(DIRECT.format(10, 2), "TensorRT 10.2, but 10.3"), (THROUGH.format(8, 6), "TensorRT 8.6"), ("", "MAJOR")],
)
def test_headers_that_are_too_old_or_none_are_refused(text: str, said: str, tmp_path: Path) -> None:
    headers(tmp_path / "include", text)
    with pytest.raises(PluginError, match=said):
        find_headers(tmp_path)


def test_a_folder_without_headers_is_refused_with_the_places_searched(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"no NvInferRuntime\.h in include, .*libnvinfer-headers-dev"):
        find_headers(tmp_path)


def test_the_command_builds_only_one_library_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--cuda", "--tensorrt-root", str(tmp_path)]):
        assert run(topw, "topw", "TOPW", ["plugins", "build", *words]) == 2
        assert "either --cuda or --tensorrt-root DIR" in capsys.readouterr().err


def test_the_command_refuses_a_root_without_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(topw, "topw", "TOPW", ["plugins", "build", "--tensorrt-root", str(tmp_path)]) == 1
    assert "has no NvInferRuntime.h" in capsys.readouterr().err


def test_the_library_hands_out_its_creator_and_links_no_tensorrt(tmp_path: Path) -> None:
    root = os.environ.get("TENSORRT_ROOT")
    if not root:
        pytest.skip("TENSORRT_ROOT names no folder with TensorRT's headers")
    built = compile_tensorrt(Path(root), tmp_path / "libtopw_tensorrt.so", [90])
    library = ctypes.CDLL(str(built.path))
    count = ctypes.c_int32()
    library.getCreators.restype = ctypes.c_void_p
    assert library.getCreators(ctypes.byref(count))
    assert count.value == 1
    assert library.topw_cuda_device_count() >= 0
    assert b"libnvinfer" not in built.path.read_bytes()

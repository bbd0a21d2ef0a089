"""The CPU commands of docs/guide/edge.md run, verbatim and in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.cuda import tools
from tests.support.shared import made_once

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "edge.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- runs on a CPU(?P<needs>[^>]*) -->\n```sh\n(?P<commands>.*?)```", re.DOTALL)


def commands(needs: str) -> list[str]:
    """The page's blocks that need just this, in order."""
    blocks = "".join(block["commands"] for block in BLOCK.finditer(PAGE) if block["needs"] == needs)
    lines = blocks.splitlines()
    return [command for line in lines if (command := line.partition(" #")[0].strip())]


def run(command: str, folder: Path, **variables: str) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | variables
    words = shlex.split(command)
    program = shutil.which(words[0], path=environment["PATH"])
    assert program, f"{words[0]} is not installed beside {sys.executable}"
    done = subprocess.run([program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_page_marks_no_blocks_of_commands_that_these_tests_leave_out() -> None:
    assert {block["needs"] for block in BLOCK.finditer(PAGE)} == {"", ", needs nvcc"}
    assert PAGE.count("<!-- runs on a CPU") == len(BLOCK.findall(PAGE))
    assert len(commands("")) == 6
    assert len(commands(", needs nvcc")) == 2


def test_trtexec_gets_the_library_by_the_option_that_finds_its_plugin() -> None:
    """--staticPlugins only opens the library, which does not register itself: it exports getCreators."""
    assert "--dynamicPlugins=libtopw_cuda.so" in PAGE
    assert "--staticPlugins" not in PAGE


def export_once(command: str, folder: Path, factory: pytest.TempPathFactory) -> Path:
    """Link in `folder` to what the page's `topw-export` writes, once for all tests."""
    name = shlex.split(command)[2]

    def make(place: Path) -> None:
        place.mkdir()
        run(command, place)

    (folder / name).symlink_to(made_once(factory, f"edge-{name}", make) / name)
    return folder / name


@pytest.mark.long
def test_the_commands_for_a_cpu_work(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for command in commands(""):
        if command.startswith("topw-export"):
            assert export_once(command, tmp_path, tmp_path_factory).is_dir()
        else:
            run(command, tmp_path)


@pytest.mark.long
def test_the_kernels_are_compiled_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    home = tools.home()
    for command in commands(", needs nvcc"):
        run(command, tmp_path, **({} if home is None else {"CUDA_HOME": str(home)}))
    assert (tmp_path / "libtopw_cuda.so").stat().st_size > 100_000

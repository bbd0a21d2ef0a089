"""The tests themselves: what `make quick` reaches, what tests import, and that no verdict depends on a clock."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import import_graph
from tests.support.import_graph import MODULES
from topw_deploy.cli.main import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
LEFT_OUT = re.compile(r"pytest\.mark\.(slow|long|broad)\b")

# Modules that no test of their part imports: they are run as a process, by a server, or from a file. Which quick test
# does that.
ELSEWHERE = {
    "topw_deploy.__main__": "cli/test_main.py",
    "topw_lab.bench.peers": "bench/test_peers.py",
    "topw_lab.judges": "cli/test_judge_files.py",
    "topw_deploy.triton.backend": "scale/test_triton.py",
}

# Files that read a clock, and why no verdict depends on what they read.
CLOCKS = {
    "support/waiting.py": "the time after which a wait is a hang",
    "engine/test_delivery.py": "a clock that the test sets forward",
    "gpu/test_runner.py": "a clock that the test holds",
    "runtime/ort/test_device_binding.py": "the start that a model is given",
    "serve/test_lifecycle.py": "a clock that the test sets forward",
    "nvidia/worker.py": "seconds that are printed",
    "peers/run_builders.py": "seconds that are printed",
    "scale/__init__.py": "the time after which a wait is a hang",
    "scale/ray_cluster.py": "seconds that are printed, and the time after which a wait is a hang",
    "scale/triton_server.py": "seconds that are printed, and the time after which a wait is a hang",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file of the tests names in its imports, wherever they are."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join((*above, *(node.module or "").split("."))).rstrip(".")
            found |= {import_graph.defining(base, alias.name) for alias in node.names}
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(found)


def helpers(path: Path) -> Iterator[Path]:
    """The files that a test file runs: itself, the tests' modules that it imports, and its conftest.py files."""
    waiting, seen = [path], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        yield file
        waiting += [ROOT / f"{name.replace('.', '/')}.py" for name in imported(file) if name.startswith("tests.")]
        waiting += [folder / "conftest.py" for folder in file.parents if folder.is_relative_to(TESTS)]


def part_of(module: str) -> str:
    """`export` for `topw_deploy.export.pipeline`."""
    return (*module.split("."), "__init__")[1]


def is_quick(path: Path) -> bool:
    """Whether `make quick` runs a test of the file."""
    marks = [node for node in tree(path).body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if any(LEFT_OUT.search(ast.unparse(node)) for node in marks):
        return False
    return any(
        node.name.startswith("test_") and not any(LEFT_OUT.search(ast.unparse(each)) for each in node.decorator_list)
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def commands_in(files: set[Path]) -> set[str]:
    """The modules of the commands that files name in a text."""
    texts = {node.value for file in files for node in ast.walk(tree(file)) if isinstance(node, ast.Constant)}
    return {f"topw_deploy.cli.{module}" for name, (module, _text) in COMMANDS.items() if name in texts}


def reached_by(named: set[str]) -> set[str]:
    """Return the named modules, the modules that they import, and what these import from their own folder."""
    waiting = [*named, *(found.name for name in named for found in import_graph.imports(name))]
    reached = set[str]()
    while waiting:
        module = waiting.pop()
        if module in MODULES and module not in reached:
            reached.add(module)
            room = import_graph.room_of(module)
            others = {found.name for found in import_graph.imports(module)} & MODULES.keys()
            waiting += [other for other in others if import_graph.room_of(other) == room]
    return reached


QUICK = [path for path in FILES if path.name.startswith("test_") and is_quick(path)]


def test_quick_reaches_every_module_by_the_tests_of_its_part() -> None:
    """The tests of a part are in the folder of its name; those of a part without one, and of commands, are anywhere."""
    parts = {path.name for path in TESTS.iterdir() if path.is_dir()}
    commands = commands_in({file for path in QUICK for file in helpers(path)})
    missing = {name for name, path in MODULES.items() if path.name != "__init__.py"}
    for part in {part_of(name) for name in MODULES}:
        own = [path for path in QUICK if part not in parts or path.relative_to(TESTS).parts[0] == part]
        files = {file for path in own for file in helpers(path)}
        named = {name for file in files for name in imported(file) if name in MODULES} | commands_in(files)
        missing -= {name for name in reached_by(named | commands if part == "cli" else named) if part_of(name) == part}
    assert missing == ELSEWHERE.keys()


def test_modules_without_an_import_in_the_tests_of_their_part_have_another_quick_test() -> None:
    for module, file in ELSEWHERE.items():
        assert TESTS / file in QUICK, module


def test_only_tests_of_the_measurements_import_them() -> None:
    other = "export/source/test_accounting.py"  # builds tiny models of architectures that only the coverage table has
    for path in FILES:
        place = path.relative_to(TESTS)
        if place.parts[0] not in ("benchmarks", "gpu", "training") and place.as_posix() != other:
            assert not any(name.split(".")[0] == "benchmarks" for name in imported(path)), path


def test_no_other_file_reads_a_clock() -> None:
    reading = re.compile(r"\b(perf_counter|monotonic|process_time|thread_time|time\.time|time_ns)\b")
    found = {
        path.relative_to(TESTS).as_posix()
        for path in FILES
        if path != Path(__file__) and reading.search(path.read_text(encoding="utf-8"))
    }
    assert found - CLOCKS.keys() == set()
    assert CLOCKS.keys() <= found, "list only files that read one"


def test_hypothesis_has_no_deadline_by_its_profile_alone() -> None:
    for path in FILES:
        if path not in (Path(__file__), TESTS / "conftest.py"):
            assert "deadline=" not in path.read_text(encoding="utf-8"), path

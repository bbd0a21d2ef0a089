"""Imports point one way: cli -> export | runtime -> sampling, and the runtime stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import topw_deploy
from topw_deploy import install

ROOT = Path(topw_deploy.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

# What each part of the package may import from the others, beside itself.
BASE = {"errors", "files", "manifest", "sampling", "progress", "dtypes"}
ALLOWED = {
    "errors": set(),
    "files": set(),
    "progress": set(),
    "dtypes": set(),
    "memory": set(),
    "telemetry": set(),
    "printable": set(),
    "plain_text": {"errors"},
    "install": {"errors"},
    "sizes": {"errors"},
    "reports": {"errors"},
    "manifest": {"errors", "files", "sampling"},
    "sampling": {"errors"},
    "plugins": {"errors", "install", "sampling"},
    "tensorrt": BASE | {"plugins"},
    "runtime": BASE | {"install", "telemetry", "sizes", "plugins", "tensorrt"},
    "processors": {"errors", "sampling"},
    "demo": {"errors"},
    "export": BASE | {"memory", "install", "sizes", "runtime", "demo"},
    "stats": BASE | {"plain_text", "printable", "reports", "plugins", "runtime", "export"},
    "bench": BASE | {"install", "printable", "reports", "plugins", "runtime", "export", "processors"},
    "cli": BASE
    | {"install", "telemetry", "plain_text", "printable", "sizes", "reports", "plugins", "tensorrt", "runtime"}
    | {"export", "demo", "stats", "bench"},
    "__main__": {"cli"},
}
THIRD_PARTY = {
    "errors": set(),
    "files": set(),
    "install": set(),
    "reports": {"matplotlib"},
    "manifest": set(),
    "sampling": {"numpy"},
    "plugins": {"numpy"},
    "tensorrt": {"numpy"},
    "runtime": {"numpy", "onnxruntime", "tokenizers", "jinja2"},
    "processors": {"torch", "transformers"},
}
# Folders that need more than their part does, and that nothing imports unasked.
THIRD_PARTY_WITHIN = {"sampling/torch": {"numpy", "torch"}}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every module that the file imports, wherever in it, as a dotted name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: write the full name"
            base = node.module or ""
            yield base
            if base == "topw_deploy":
                yield from (f"topw_deploy.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    for name in imported(path):
        pieces = name.split(".")
        if pieces[0] == "topw_deploy" and len(pieces) > 1 and pieces[1] != part:
            assert part == "__init__" or pieces[1] in ALLOWED[part], f"{part} may not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_part_needs_only_its_own_libraries(path: Path) -> None:
    folder = path.relative_to(ROOT).parent.as_posix()
    allowed = THIRD_PARTY_WITHIN.get(folder, THIRD_PARTY.get(part_of(path)))
    if allowed is None:
        return
    for name in imported(path):
        top = name.split(".")[0]
        assert top in allowed | {"topw_deploy"} or top in sys.stdlib_module_names, f"{path} imports {name}"


@pytest.mark.parametrize("path", [p for p in SOURCES if part_of(p) == "export"], ids=lambda p: p.stem)
def test_the_exporter_runs_models_only_to_verify_them(path: Path) -> None:
    uses_runtime = any(name.startswith("topw_deploy.runtime") for name in imported(path))
    assert not uses_runtime or "verification" in path.parts, f"{path} imports the runtime"


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split()[-1000:])


HEAVY = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript"}


def test_importing_the_runtime_loads_no_exporter_library() -> None:
    loaded = loaded_by("import topw_deploy.runtime")
    assert "onnxruntime" in loaded
    assert not loaded & (HEAVY | {"click", "huggingface_hub"})


def test_the_runtime_without_onnxruntime_says_what_to_install() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; import topw_deploy.runtime"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "running a model needs onnxruntime, which is not installed ([cpu] brings it, or [gpu]" in done.stderr
    assert done.stderr.endswith(f"; run: {install.how_to('cpu')}\n")


def test_importing_the_reference_loads_numpy_alone() -> None:
    assert not loaded_by("import topw_deploy.sampling") & (HEAVY | {"onnxruntime", "click", "tokenizers", "jinja2"})


@pytest.mark.parametrize("arguments", ["['-h']", "['generate', '--help']", "['inspect', '--help']", "['--version']"])
def test_help_loads_neither_torch_nor_onnxruntime(arguments: str) -> None:
    statement = f"""
import contextlib, io
from topw_deploy.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main({arguments})
assert out.getvalue()
"""
    assert not loaded_by(statement) & (HEAVY | {"onnxruntime", "tokenizers"})

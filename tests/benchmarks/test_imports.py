"""Only `tests/benchmarks` and `tests/gpu` import `benchmarks`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN_TESTS = {Path("tests/benchmarks"), Path("tests/gpu")}


def test_only_their_own_tests_import_the_benchmarks() -> None:
    found = set()
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "benchmarks" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            if any(name.split(".")[0] == "benchmarks" for name in names):
                found.add(path.parent.relative_to(ROOT))
    assert found == OWN_TESTS

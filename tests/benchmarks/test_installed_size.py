"""benchmarks/installed_size.py measures an installation, and the docs quote it."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from benchmarks import installed_size

ROOT = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, importlib.metadata.Distribution]:
    """This package, what it needs directly or through others, and a package that it does not need."""
    wanted = {
        "topw-deploy": ["tokenizers>=0.20", "click", 'onnxruntime; extra == "cpu"', 'torch; extra == "export"'],
        "onnxruntime": [],
        "tokenizers": ["huggingface_hub<3,>=0.16.4", 'pytest; extra == "testing"'],
        "huggingface-hub": ["click", "tqdm", 'httpx[socks]; python_version > "3"'],
        "click": [],
        "tqdm": [],
        "httpx": ['socksio; extra == "socks"'],
        "socksio": [],
        "torch": [],
    }
    found = {}
    for name, requires in wanted.items():
        info = tmp_path / f"{name}.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {text}" for text in requires)]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (tmp_path / f"{name}.py").write_bytes(b"#" * 1_000_000)
        (info / "RECORD").write_text(f"{name}.py,,\ngone.py,,\n")
        found[name] = importlib.metadata.Distribution.at(info)
    return found


def test_the_report_holds_what_the_runtime_needs(packages: dict[str, importlib.metadata.Distribution]) -> None:
    *lines, _, last = installed_size.report(packages)
    assert {line.split(" | ")[0].strip("| ") for line in lines} == packages.keys() - {"torch"}
    assert last == "8 packages, 8 MB"


def test_the_pages_agree_on_the_size() -> None:
    page = (ROOT / "docs" / "guide" / "install.md").read_text("utf-8")
    (total,) = re.findall(r"takes (\d+ MB) on disk", page)
    assert total in (ROOT / "README.md").read_text("utf-8")

"""The C++ sources include every standard header they use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from topw_deploy.plugins import compile_native, nvcc

HEADERS = {
    "algorithm": r"max|min|sort|stable_sort|partial_sort|nth_element|fill|fill_n|copy|copy_n|lower_bound|upper_bound"
    r"|make_heap|push_heap|pop_heap|swap_ranges|clamp|find",
    "atomic": r"atomic|atomic_\w+|memory_order_\w+",
    "memory": r"unique_ptr|shared_ptr|make_unique",
    "mutex": r"mutex|lock_guard|unique_lock|call_once|once_flag",
    "string": r"string|to_string",
    "vector": r"vector",
}
SOURCES = sorted([*compile_native.SOURCES.glob("*.cpp"), *nvcc.SOURCES.glob("*.c*")])


def included(source: Path, seen: set[Path]) -> set[str]:
    """Headers in <> of a source and the project files it includes."""
    if source in seen:
        return set()
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    found = set(re.findall(r"^#include <(\w+)>", text, re.MULTILINE))
    for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
        for folder in (source.parent, compile_native.SOURCES):
            if (folder / name).is_file():
                found |= included(folder / name, seen)
                break
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_source_includes_what_it_uses_of_the_standard_library(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    used = {header for header, names in HEADERS.items() if re.search(rf"\bstd::(?:{names})\b", text)}
    assert used <= included(source, set())

"""Size on disk of topw-deploy and its dependencies, for docs/guide/install.md.

    python benchmarks/installed_size.py        (with the Python of the environment to measure)

Counts the files that pip recorded, compiled modules included. Install a wheel: an editable installation keeps this
package's files in the clone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROOT, HEAVY = "topw-deploy", "tokenizers"
Packages = Mapping[str, metadata.Distribution]


def normalised_name(name: str) -> str:
    """A distribution's normalised name: huggingface-hub for huggingface_hub."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(package: metadata.Distribution, extras: frozenset[str] = frozenset()) -> dict[str, frozenset[str]]:
    """Requirements of a package with `extras`: name -> requested extras."""
    found: dict[str, frozenset[str]] = {}
    for wanted in package.requires or ():
        text, _, marker = wanted.partition(";")
        asked = re.findall(r"""extra\s*==\s*['"]([^'"]+)""", marker)
        if asked and not extras & set(asked):
            continue
        parts = re.match(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?", text)
        assert parts is not None, wanted
        name = normalised_name(parts[1])
        more = frozenset(part.strip() for part in (parts[2] or "").split(",") if part.strip())
        found[name] = found.get(name, frozenset()) | more
    return found


def needed_packages(
    packages: Packages, start: Mapping[str, frozenset[str]], leave: frozenset[str] = frozenset()
) -> set[str]:
    """Installed packages that `start` needs, itself included, without following those in `leave`."""
    seen: set[str] = set()
    open_ = list(start.items())
    while open_:
        name, extras = open_.pop()
        if name in packages and name not in seen and name not in leave:
            seen.add(name)
            open_ += requirements(packages[name], extras).items()
    return seen


def installed_bytes(package: metadata.Distribution) -> int:
    """Bytes of the package's installed files."""
    paths = [Path(str(file.locate())) for file in package.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file())


def report(packages: Packages) -> list[str]:
    """Table lines: packages, largest first, with a mark on those that only tokenizers needs, and the sum."""
    runtime = frozenset({"cpu"}) if "onnxruntime" in packages else frozenset({"gpu"})
    every = needed_packages(packages, {ROOT: runtime})
    brought = every - needed_packages(packages, {ROOT: runtime}, frozenset({HEAVY})) - {HEAVY}
    sizes = {name: installed_bytes(packages[name]) for name in every}
    lines = ["| package | version | MB | |", "|---|---|---|---|"]
    for name in sorted(every, key=lambda name: -sizes[name]):
        why = f"through {HEAVY} only" if name in brought else ""
        lines.append(f"| {name} | {packages[name].version} | {sizes[name] / 1e6:.1f} | {why} |")
    total, extra = sum(sizes.values()), sum(sizes[name] for name in brought)
    through = f"{len(brought)} of them, {extra / 1e6:.0f} MB, come through {HEAVY} only"
    return [*lines, "", f"{len(every)} packages, {total / 1e6:.0f} MB; {through}."]


def main() -> int:
    packages = {normalised_name(found.metadata["Name"]): found for found in metadata.distributions()}
    if ROOT not in packages:
        sys.stderr.write(f"{ROOT} is not installed for {sys.executable}; run this with the Python that has it.\n")
        return 1
    print("\n".join(report(packages)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

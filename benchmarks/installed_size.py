"""Size on disk of topw-deploy and its dependencies, for docs/guide/install.md.

    python benchmarks/installed_size.py        (with the Python of the environment to measure)

Counts the files that pip recorded, compiled modules included. Install a wheel: an editable installation keeps this
package's files in the clone.
"""

from __future__ import annotations

from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "topw-deploy"


def report(packages: dict[str, Distribution]) -> list[str]:
    """The installed packages that this one needs, largest first, and their sum. packages: by canonical name."""
    sizes: dict[str, int] = {}
    waiting = [(ROOT, "cpu" if "onnxruntime" in packages else "gpu")]
    while waiting:
        name, extra = waiting.pop()
        package = packages[name]
        paths = [package.locate_file(file) for file in package.files or ()]
        sizes[name] = sum(path.stat().st_size for path in paths if path.is_file())  # type: ignore[attr-defined]
        for requirement in map(Requirement, package.requires or ()):
            needed = canonicalize_name(requirement.name)
            is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if is_needed and needed in packages and needed not in sizes:
                waiting += [(needed, one) for one in requirement.extras or ("",)]
    lines = [
        f"| {name} | {packages[name].version} | {sizes[name] / 1e6:.1f} MB |"
        for name in sorted(sizes, key=lambda name: -sizes[name])
    ]
    return [*lines, "", f"{len(sizes)} packages, {sum(sizes.values()) / 1e6:.0f} MB"]


if __name__ == "__main__":
    print("\n".join(report({canonicalize_name(found.metadata["Name"]): found for found in distributions()})))

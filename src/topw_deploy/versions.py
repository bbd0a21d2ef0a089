"""Read and compare the versions of packages."""

from __future__ import annotations

import re
from importlib import metadata

import topw_deploy

_EXPORTED_WITH = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def major_minor(version: str) -> tuple[int, ...]:
    """Return the major and the minor number, to compare versions: (10, 13) for `10.13.3.9`, () for an empty string."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def library_versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that an export uses, by name."""
    found = {name: version for name in _EXPORTED_WITH if (version := installed_version(name)) is not None}
    return {"topw_deploy": topw_deploy.__version__} | found

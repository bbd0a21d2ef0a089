"""Versions of installed packages."""

from __future__ import annotations

import re
from importlib import metadata

import topw_deploy

_EXPORTED_WITH = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def release(version: str) -> tuple[int, ...]:
    """Major and minor number, for comparing: (10, 13) of `10.13.3.9`; () of an empty string."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def installed(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def library_versions() -> dict[str, str]:
    """Versions of the libraries used for an export and of this package, by name."""
    found = {name: version for name in _EXPORTED_WITH if (version := installed(name)) is not None}
    return {"topw_deploy": topw_deploy.__version__} | found

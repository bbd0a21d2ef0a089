"""Library versions used for an export."""

from __future__ import annotations

import importlib.metadata

import topw_deploy

_LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def library_versions() -> dict[str, str]:
    """Name -> version, including this package."""
    versions = {"topw_deploy": topw_deploy.__version__}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions

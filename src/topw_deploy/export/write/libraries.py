"""The versions that an export was made with."""

from __future__ import annotations

import importlib.metadata

import topw_deploy

_LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def library_versions() -> dict[str, str]:
    """This package's version and those of the libraries an export depends on, as far as installed."""
    versions = {"topw_deploy": topw_deploy.__version__}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions

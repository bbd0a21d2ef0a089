"""Top-W decoding in production: exporter, runtime and kernels around an ONNX graph.

- `topw_deploy.sampling`: Top-W itself. Needs numpy.
- `topw_deploy.export`: writes exports. Needs torch, transformers and onnx_ir.
- `topw_deploy.runtime`: runs exports. Needs numpy, onnxruntime, tokenizers and minijinja.
- `topw_deploy.engine`: runs the requests of many callers in batches. Needs what the runtime needs.

Importing `topw_deploy` imports none of these packages, until one of its four names is used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topw_deploy.engine import Engine
    from topw_deploy.export import export_model
    from topw_deploy.runtime import TopWModel, TopWSampler

__all__ = ["Engine", "TopWModel", "TopWSampler", "export_model"]
__version__ = "0.1.0"

_PACKAGES = {"Engine": "engine", "TopWModel": "runtime", "TopWSampler": "runtime", "export_model": "export"}


# Official builds of onnxruntime send events to Microsoft. Its import reads this variable; "0" keeps them.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PACKAGES[name]}"), name)

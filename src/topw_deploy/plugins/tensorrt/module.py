"""Import TensorRT's Python module, and identify the plugin."""

from __future__ import annotations

import importlib
from typing import Any

from topw_deploy import install
from topw_deploy.errors import PluginError
from topw_deploy.plugins.shared_library import CUDA_ABI_VERSION
from topw_deploy.versions import major_minor

MODULES = ("tensorrt", "tensorrt_bindings")
"""Names of the module. The second is installed without the package that downloads NVIDIA's libraries."""

OLDEST = (10, 3)
"""The oldest TensorRT whose parser reliably uses plugins of this kind (IPluginV3)."""

NAME, VERSION, NAMESPACE = "TopWSample", "1", "topw"

BUILT_WITH = f"{VERSION}.{CUDA_ABI_VERSION}"
"""The plugin's version and that of the kernels' interface, which determines an engine's workspace."""


def tensorrt_module() -> Any:
    """Import TensorRT's Python module. Raises PluginError if missing or older than OLDEST."""
    failures = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # of the module or NVIDIA's libraries
            failures.append(f"{name}: {error}")
            continue
        if major_minor(module.__version__) < OLDEST:
            raise PluginError(
                f"TensorRT {module.__version__} is installed, but {'.'.join(map(str, OLDEST))} or newer is needed; "
                "run: pip install -U tensorrt"
            )
        return module
    raise PluginError(
        f"TensorRT's Python module cannot be imported ({', '.join(failures)}); install TensorRT, which on a Jetson "
        f"comes with JetPack, or run: {install.install_command('tensorrt')}"
    )

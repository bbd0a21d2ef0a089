"""TensorRT's Python module, and the plugin in its registry."""

from __future__ import annotations

import importlib
import re
from typing import Any

from topw_deploy import install
from topw_deploy.errors import PluginError
from topw_deploy.plugins.shared_library import CUDA_ABI_VERSION

MODULES = ("tensorrt", "tensorrt_bindings")
"""The module by its names: the second is what is left where the package that fetches NVIDIA's libraries is not used."""

OLDEST = (10, 3)
"""The first TensorRT whose parser gives nodes to plugins of this kind reliably."""

NAME, VERSION, NAMESPACE = "TopWSample", "1", "topw"

BUILT_WITH = f"{VERSION}.{CUDA_ABI_VERSION}"
"""What an engine with the plugin was built with: the plugin's version, and the kernels' interface, which says how much
workspace an engine sets aside."""


def tensorrt_module() -> Any:
    """TensorRT's Python module, under whichever of its names it imports.

    Raises PluginError where there is none, or one older than OLDEST.
    """
    failures = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # the module, or NVIDIA's libraries behind it
            failures.append(f"{name}: {error}")
            continue
        if version_of(module) < OLDEST:
            raise PluginError(
                f"TensorRT {module.__version__} is installed, but {'.'.join(map(str, OLDEST))} or newer is needed; "
                "run: pip install -U tensorrt"
            )
        return module
    raise PluginError(
        f"TensorRT's Python module cannot be imported ({', '.join(failures)}); install TensorRT, which on a Jetson "
        f"comes with JetPack, or run: {install.how_to('tensorrt')}"
    )


def version_of(module: Any) -> tuple[int, ...]:
    """Major and minor version of a TensorRT module, (10, 13) for 10.13.3.9."""
    return tuple(int(number) for number in re.findall(r"\d+", module.__version__)[:2])


def register() -> None:
    """Put the plugin into TensorRT's registry, where parser and runtime look for it, once for this process.

    A plugin of the same name that is there already, such as the library of `topw plugins build --tensorrt-root` loaded
    by the host, stays. Call it before parsing a model and before deserialising an engine that has the plugin.

    Raises PluginError where TensorRT or the CUDA library is absent.
    """
    if not registered():
        from topw_deploy.plugins.tensorrt import plugin  # imports TensorRT: only where it was asked for

        plugin.register()


def registered() -> bool:
    """Whether TensorRT's registry has a plugin for the node. Raises PluginError where there is no TensorRT."""
    registry = tensorrt_module().get_plugin_registry()
    return any(
        (creator.name, creator.plugin_version, creator.plugin_namespace) == (NAME, VERSION, NAMESPACE)
        for creator in registry.all_creators
    )

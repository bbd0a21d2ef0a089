"""Chooses what runs the sampler node: the Python plugin, the C++ plugin library, or the node's function.

Both plugins serialize the same fields, so each of them runs the other's engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import PluginError, TensorRTError
from topw_deploy.plugins import tensorrt as plugins
from topw_deploy.plugins.shared_library import TENSORRT_VARIABLE, installed_tensorrt
from topw_deploy.plugins.tensorrt.module import BUILT_WITH


@dataclass(frozen=True)
class PluginChoice:
    """What runs the sampler node.

    kind: "python" or "library" for a plugin, "none" for the function.
    version: of the plugin; "" without one.
    why_none: why there is no plugin, as a clause; "" with one.
    """

    kind: str
    version: str = BUILT_WITH
    why_none: str = ""

    def __str__(self) -> str:
        return "the sampler as a plugin" if self.kind != "none" else f"the sampler as a function: {self.why_none}"


def choose_plugin(plugin: str, trt: Any) -> PluginChoice:
    """Register the plugin that a request asks for.

    plugin: as in TensorRTRequest.

    Raises TensorRTError if the plugin is not available, unless `plugin` is "auto".
    """
    if plugin == "none":
        if plugins.registered():  # the parser would use the plugin
            raise TensorRTError(
                "this process has already registered the sampler's plugin; build without it in another."
            )
        return PluginChoice("none", "", "--plugin none was given")
    if plugin not in ("auto", "python"):
        _load_library(Path(plugin), trt)
        return PluginChoice("library")
    try:
        plugins.register()
    except PluginError as error:
        if plugin == "python":
            raise TensorRTError(f"the plugin is not available: {error}") from None
        path = installed_tensorrt()
        if path is None:
            return PluginChoice("none", "", str(error).rstrip("."))
        _load_library(path, trt)
        return PluginChoice("library")
    return PluginChoice("python")


def register_plugin_of(kind: str, version: str, trt: Any) -> None:
    """Register the plugin of an engine, whose stamp states kind and version.

    Raises TensorRTError if the plugin is missing or has another version.
    """
    if kind == "none":
        return
    if version != BUILT_WITH:
        raise TensorRTError(f"it was built with version {version} of the plugin, but this is {BUILT_WITH}")
    try:
        plugins.register()
    except PluginError as error:
        path = installed_tensorrt()
        if path is None:
            raise TensorRTError(f"it needs the sampler's plugin, which is unusable: {str(error).rstrip('.')}") from None
        _load_library(path, trt)


def _load_library(path: Path, trt: Any) -> None:
    if not path.is_file():
        raise TensorRTError(
            f"the plugin's library {path} (from --plugin or {TENSORRT_VARIABLE}) is not a file; "
            "`topw plugins build --tensorrt-root` builds one."
        )
    trt.get_plugin_registry().load_library(str(path.absolute()))
    if not plugins.registered():
        raise TensorRTError(
            f"{path} has no plugin for the sampler's node; `topw plugins build --tensorrt-root` builds one."
        )

"""What answers the sampler's node in an engine: the plugin as a Python class or as a library, or the node's function.

Both kinds of plugin keep the same fields in an engine, so either may run what the other built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import EngineError, PluginError
from topw_deploy.plugins import tensorrt as plugins
from topw_deploy.plugins.tensorrt.build import VARIABLE, installed
from topw_deploy.plugins.tensorrt.module import BUILT_WITH


@dataclass(frozen=True)
class Chosen:
    """kind: "python", "library" or "none", then `why_none` is a clause. version: of the plugin, "" for none."""

    kind: str
    version: str = BUILT_WITH
    why_none: str = ""

    @property
    def said(self) -> str:
        """For people."""
        return "the sampler as a plugin" if self.kind != "none" else f"the sampler as a function: {self.why_none}"


def choose(asked: str, trt: Any) -> Chosen:
    """Put the plugin that `asked` names (see EngineRequest) into TensorRT's registry, where the parser finds it.

    Raises EngineError for one that cannot be had; "auto" goes on with the function instead.
    """
    if asked == "none":
        if plugins.registered():  # the parser would take it
            raise EngineError("this process has registered the sampler's plugin already; build without it in another.")
        return Chosen("none", "", "--plugin none asks for it")
    if asked not in ("auto", "python"):
        _load(Path(asked), trt)
        return Chosen("library")
    try:
        plugins.register()
    except PluginError as error:
        if asked == "python":
            raise EngineError(f"the plugin cannot be had: {error}") from None
        path = installed()
        if path is None:
            return Chosen("none", "", str(error).rstrip("."))
        _load(path, trt)
        return Chosen("library")
    return Chosen("python")


def prepare(kind: str, version: str, trt: Any) -> None:
    """Have the plugin in TensorRT's registry that an engine of this kind needs.

    Raises EngineError where it cannot be had, or is of another version.
    """
    if kind == "none":
        return
    if version != BUILT_WITH:
        raise EngineError(f"it was built with version {version} of the plugin, and this is {BUILT_WITH}")
    try:
        plugins.register()
    except PluginError as error:
        path = installed()
        if path is None:
            raise EngineError(f"it needs the sampler's plugin, which cannot be had: {str(error).rstrip('.')}") from None
        _load(path, trt)


def _load(path: Path, trt: Any) -> None:
    if not path.is_file():
        raise EngineError(
            f"the plugin's library {path} is no file; `topw plugins build --tensorrt-root` makes one (--plugin, "
            f"{VARIABLE})."
        )
    trt.get_plugin_registry().load_library(str(path.absolute()))
    if not plugins.registered():
        raise EngineError(
            f"{path} has no plugin for the sampler's node; `topw plugins build --tensorrt-root` makes one."
        )

"""TensorRT's registry of plugins, where its parser and runtime look for them."""

from __future__ import annotations

from topw_deploy.plugins.tensorrt.module import NAME, NAMESPACE, VERSION, tensorrt_module


def register() -> None:
    """Register the Python plugin, unless a plugin for the node is registered, such as the C++ library's.

    Call this before parsing a model or deserializing an engine with the plugin.
    Raises PluginError if TensorRT or the CUDA library is missing.
    """
    if not registered():
        from topw_deploy.plugins.tensorrt import plugin  # imports TensorRT

        plugin.register()


def registered() -> bool:
    """Whether a plugin for the node is registered. Raises PluginError without TensorRT."""
    registry = tensorrt_module().get_plugin_registry()
    return any(
        (creator.name, creator.plugin_version, creator.plugin_namespace) == (NAME, VERSION, NAMESPACE)
        for creator in registry.all_creators
    )

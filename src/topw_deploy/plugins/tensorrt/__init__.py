"""TensorRT's plugin for `topw::TopWSample`: in Python (`register`) and C++ (`topw_plugin.cpp`).

The plugin is optional: without it, TensorRT inlines the node's function. This package imports TensorRT on first use.
"""

from topw_deploy.plugins.tensorrt.module import NAME, NAMESPACE, VERSION, tensorrt_module

__all__ = ["register", "registered", "tensorrt_module"]


def register() -> None:
    """Register the Python plugin, unless a plugin for the node is registered, such as the C++ library's.

    Call before parsing a model or deserializing an engine. Raises PluginError without TensorRT or the CUDA library.
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

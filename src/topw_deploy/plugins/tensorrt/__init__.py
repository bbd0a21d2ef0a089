"""TensorRT's plugin for `topw::TopWSample`: in Python (`register`) and C++ (`topw_plugin.cpp`).

Optional: otherwise TensorRT inlines the node's function. Imports TensorRT only on use.
"""

from topw_deploy.plugins.tensorrt.module import tensorrt_module
from topw_deploy.plugins.tensorrt.registry import register, registered

__all__ = ["register", "registered", "tensorrt_module"]

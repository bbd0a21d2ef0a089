"""TensorRT's plugin for the node `topw::TopWSample`: in Python (`register`), and in C++ for hosts without it (`build`).

Neither is needed: without a plugin TensorRT inlines the node's function. Nothing here imports TensorRT unasked.
"""

from topw_deploy.plugins.tensorrt.module import register, registered, tensorrt_module

__all__ = ["register", "registered", "tensorrt_module"]

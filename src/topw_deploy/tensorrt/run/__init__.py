"""Runs a TensorRT engine behind the session and binding protocols of `topw_deploy.runtime`.

Imports TensorRT and CUDA only when a model is opened. Never imports `topw_deploy.runtime`, which imports this package.
Tested on a CPU with doubles of TensorRT and CUDA, and never run on a GPU.
"""

"""Run a TensorRT engine behind the session and binding protocols of `topw_deploy.runtime`.

Imports TensorRT and CUDA only when a model is opened, and nothing of `topw_deploy.runtime`, which imports this package.
Tested on a CPU, with doubles whose engine is onnxruntime and whose device memory is the host's; not run on a GPU.
"""

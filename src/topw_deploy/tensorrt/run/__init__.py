"""Run a TensorRT engine behind the session and binding protocols of `topw_deploy.runtime`.

Imports TensorRT and CUDA only when a model is opened, and never `topw_deploy.runtime`, which imports this package.
Tested on a CPU with doubles of both; not run on a GPU.
"""

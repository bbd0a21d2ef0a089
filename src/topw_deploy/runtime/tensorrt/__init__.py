"""Runs a TensorRT engine with the loop, the caches and the results of onnxruntime's sessions.

Nothing here imports TensorRT or CUDA until a model is opened with them. Run by tests on a CPU, with doubles of both
modules whose engine is onnxruntime and whose device memory is the host's; not run on a GPU.
"""

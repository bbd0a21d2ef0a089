"""TensorRT engines of an exported folder: built on the machine that runs them, and used only where they fit.

Nothing here imports onnxruntime or onnx: a target machine needs `tensorrt` and what this package always needs.
"""

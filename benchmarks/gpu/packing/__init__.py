"""`python -m benchmarks.gpu pack`: archives of what a GPU host without a network needs.

`command` reads the options; `folders`, `onnxruntime_gpu`, `flashinfer` and `tensorrt` stage a component each; `fatbin`
zeroes GPU code of other architectures; `archives` writes .tar.xz files. `benchmarks/gpu/unpack.py` reads them.
"""

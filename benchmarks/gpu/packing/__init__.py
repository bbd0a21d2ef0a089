"""`python -m benchmarks.gpu pack`: archives for a GPU host without a network.

- `command`: the options
- `folders`, `onnxruntime_gpu`, `flashinfer`, `tensorrt`: stage one component each
- `fatbin`: zeroes GPU code of other architectures
- `archives`: writes .tar.xz files, which `benchmarks/gpu/unpack.py` reads
"""

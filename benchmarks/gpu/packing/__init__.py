"""`python -m benchmarks.gpu pack`: archives for a GPU host without a network.

- `folders`, `onnxruntime_gpu`, `flashinfer`, `tensorrt`: one component each
- `fatbin`: zeroes other architectures' GPU code
- `archives`: writes .tar.xz files for `benchmarks/gpu/unpack.py`
"""

"""`python -m benchmarks.gpu pack`: archives for a GPU host without a network, read by `benchmarks/gpu/unpack.py`."""

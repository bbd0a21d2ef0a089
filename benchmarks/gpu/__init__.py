"""Checks and measurements on an NVIDIA GPU: `python3 -m benchmarks.gpu` (docs/lab/gpu.md).

`job` defines the interface of parts and lists them.
"""

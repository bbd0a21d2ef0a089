"""Exported models in NVIDIA's Triton Inference Server, through its Python backend.

- repository: writes a model into a model repository; turns a request of Triton into one of the engine, and the engine's
  pieces into responses. Needs no Triton.
- backend: the class that Triton's Python backend calls.
"""

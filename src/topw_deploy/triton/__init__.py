"""Exported models in NVIDIA's Triton Inference Server, through its Python backend.

repository: writes a folder of a model repository.
answers: one request of Triton as a request of the engine, and its responses. Needs no Triton.
backend: what Triton's Python backend calls.
"""

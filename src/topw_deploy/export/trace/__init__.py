"""Trace transformers models to ONNX."""

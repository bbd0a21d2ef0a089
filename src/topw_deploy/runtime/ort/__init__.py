"""onnxruntime sessions, their checks and bindings."""

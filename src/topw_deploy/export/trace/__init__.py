"""From a transformers model to an ONNX graph."""

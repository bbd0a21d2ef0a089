"""From a transformers model to an ONNX graph whose weights are read only when they are written."""

"""Edit onnx_ir graphs."""

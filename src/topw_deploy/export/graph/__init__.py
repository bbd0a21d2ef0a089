"""Editing onnx_ir graphs and the weights in them."""

"""Read ONNX files without `onnx`, which machines that only run exports lack."""

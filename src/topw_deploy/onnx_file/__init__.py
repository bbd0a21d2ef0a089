"""Read ONNX files without the package `onnx`, which is not installed where exports only run."""

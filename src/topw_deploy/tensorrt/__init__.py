"""TensorRT engines of an exported folder: check the graph, build on the target machine, run where the engine fits.

Needs `tensorrt` (and cuda-python to run engines), but neither onnxruntime nor onnx.

- check: `check`, `operators`, `scope`, `onnx_file`, `protobuf`; `parser` runs TensorRT's own
- build: `request`, `profiles`, `plugin_choice`, `build`, `progress`
- find: `stamp`, `engines`
- run: `run/`
"""

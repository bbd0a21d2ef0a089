"""TensorRT engines of an exported folder: check the graph, build on the target machine, run where the engine fits.

Needs `tensorrt`, and cuda-python to run engines, but neither onnxruntime nor onnx.

- check: `check`, `operators`, `scope`, `model_file`; `api` runs TensorRT's own parser
- build: `request`, `profiles`, `plugin_choice`, `build`, `progress`
- find: `stamp`, `engines`
- run: `run/`
"""

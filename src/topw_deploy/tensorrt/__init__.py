"""TensorRT engines of an exported folder: ask the parser, build on the target machine, run where the engine fits.

Needs `tensorrt`, and cuda-python to run engines, but neither onnxruntime nor onnx.

- check: TensorRT's module, the sampler's plugin, the parser's answer
- build, stamp: an engine, its profiles, and the file beside it that says where it fits
- run, cuda: an engine behind the runtime's interface of a session

Tested with NVIDIA's parser and builder, and with doubles of TensorRT and CUDA. Engines were not run on a GPU.
"""

"""Top-W decoding in production: exporter, runtime and kernels around one ONNX graph.

Import what you need from the subpackage that does it; importing this package loads nothing else:

- `topw_deploy.sampling`  what Top-W is (numpy only)
- `topw_deploy.export`    makes the exported folder (torch, transformers, onnx_ir)
- `topw_deploy.runtime`   runs it (numpy, onnxruntime, tokenizers, jinja2)
"""

__version__ = "0.1.0"

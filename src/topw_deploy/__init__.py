"""Top-W decoding in production: exporter, runtime and kernels around an ONNX graph.

Import subpackages directly; this package loads nothing else:

- `topw_deploy.sampling`  Top-W itself (numpy only)
- `topw_deploy.export`    writes exports (torch, transformers, onnx_ir)
- `topw_deploy.runtime`   runs exports (numpy, onnxruntime, tokenizers, jinja2)
"""

__version__ = "0.1.0"

"""Top-W decoding in production: exporter, runtime and kernels around an ONNX graph.

- `topw_deploy.sampling`  Top-W itself (numpy only)
- `topw_deploy.export`    writes exports (torch, transformers, onnx_ir)
- `topw_deploy.runtime`   runs them (numpy, onnxruntime, tokenizers, jinja2)
- `topw_deploy.engine`    batches requests of many callers (the same)

Importing this package loads none of them.
"""

__version__ = "0.1.0"

"""Top-W decoding in production: exporter, runtime and kernels around an ONNX graph.

- `topw_deploy.sampling`: Top-W itself. Needs numpy.
- `topw_deploy.export`: writes exports. Needs torch, transformers and onnx_ir.
- `topw_deploy.runtime`: runs exports. Needs numpy, onnxruntime, tokenizers and minijinja.
- `topw_deploy.engine`: runs the requests of many callers in batches. Needs what the runtime needs.

Importing `topw_deploy` imports none of these packages.
"""

__version__ = "0.1.0"

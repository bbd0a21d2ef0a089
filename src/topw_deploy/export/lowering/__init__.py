"""Replaces the markers of a trace with the attention and key-value cache of a target.

| lowering | operators | cache | for |
|---|---|---|---|
| `group_query` | onnxruntime's GroupQueryAttention | static | onnxruntime |
| `scatter` | TensorScatter and Attention of opset 24 | static | TensorRT, and any runtime of standard operators |
| `concat` | Concat and Attention of opset 23 | concat | decoders that the others cannot serve |
"""

from topw_deploy.export.lowering.choose import Lowered, lower

__all__ = ["Lowered", "lower"]

"""Replaces the markers of a trace with the attention and key-value cache of a target.

| lowering | operators | cache | for |
|---|---|---|---|
| `group_query` | GroupQueryAttention | static | onnxruntime |
| `scatter` | TensorScatter, Attention of opset 24 | static | TensorRT |
| `concat` | Concat, Attention of opset 23 | concat | any other decoder |
"""

from topw_deploy.export.lowering.choose import Lowered, lower

__all__ = ["Lowered", "lower"]

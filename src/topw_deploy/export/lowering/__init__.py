"""From marker nodes to the attention of a target, and from there to the form of its key-value cache.

| lowering | operators | cache | for |
|---|---|---|---|
| `group_query` | onnxruntime's GroupQueryAttention | static | onnxruntime |
| `scatter` | TensorScatter and Attention of opset 24 | static | TensorRT, and any runtime of standard operators |
| `concat` | Concat and Attention of opset 23 | concat | whatever the others cannot serve |
"""

from topw_deploy.export.lowering.choose import Lowered, lower

__all__ = ["Lowered", "lower"]

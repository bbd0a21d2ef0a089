"""Replace trace markers with a target's attention and key-value cache.

| lowering | operators | cache | for |
|---|---|---|---|
| `group_query` | GroupQueryAttention | static | onnxruntime |
| `scatter` | TensorScatter, Attention-24 | static | TensorRT |
| `concat` | Concat, Attention-23 | concat | other decoders |
"""

from topw_deploy.export.lowering.choose import Lowered, lower

__all__ = ["Lowered", "lower"]

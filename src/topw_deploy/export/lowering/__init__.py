"""Replace trace placeholders with a target's attention and key-value cache.

- `group_query`: GroupQueryAttention, static cache, for onnxruntime.
- `scatter`: TensorScatter and Attention-24, static cache, for TensorRT.
- `concat`: Concat and Attention-23, concatenated cache, for others.
"""

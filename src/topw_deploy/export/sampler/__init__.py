"""The sampler as an ONNX function, and its node in a graph (docs/contract/graph.md, section 8)."""

"""The sampling rules other than Top-W in the sampler function (docs/contract/graph.md, section 8)."""

"""Sampling rules beside Top-W in the sampler's function (docs/contract/graph.md, section 8)."""

"""The reference's crops in numpy, one row at a time, without provably unnecessary work.

`stats` and the server's inspection need them beside a runtime that has no torch, with the work that each row took;
`sampling.torch` crops whole batches where the logits are, for Top-W in transformers.
"""

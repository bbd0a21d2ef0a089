"""The reference's crops in numpy, one row at a time, without provably unnecessary work.

`stats` and the server's inspection need these crops in a runtime without torch, with the work that each row took.
For Top-W in transformers, `sampling.torch` crops whole batches on the logits' device.
"""

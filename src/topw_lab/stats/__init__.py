"""`topw stats`: at which steps token geometry decided, which tokens it added or dropped, and how large crops are.

`collect` generates texts and recomputes the logits of every step. `analyse` compares the crop of a step with the crop
that Top-W keeps without distances.
"""

"""`topw stats`: at which steps token geometry decided, which tokens it added or dropped, and how large crops are.

`collect` generates and recomputes every step's logits; `analyse` compares crops with and without distances.
"""

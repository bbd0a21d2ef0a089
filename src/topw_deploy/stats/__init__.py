"""`topw stats`: where token geometry decided, which tokens it added or dropped, and crop sizes.

`collect` generates and recomputes every step's logits; `analyse` compares crops with and without distances.
"""

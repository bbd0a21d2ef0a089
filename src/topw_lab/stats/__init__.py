"""`topw stats`: at which steps token geometry decided, which tokens it added or dropped, and how many tokens were kept.

- `collect`: generates texts, recomputes the logits of every step, and analyses each kept set
- `report`: what happened under each setting, as text and as a picture
- `exact`, `exact_report`: the same steps under the paper's exact objective
"""

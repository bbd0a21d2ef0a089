"""`topw stats`: which steps token geometry decided, what it kept and dropped, and how large the crops are.

`request` reads prompts and settings, `collect` generates as `topw generate` does and recomputes every step's logits,
`analyse` compares a step's crop with the crop without distances, `summary` counts, `table` and `plot` show.
"""

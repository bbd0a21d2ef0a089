"""What Top-W did to a text: which steps geometry decided, what it kept and dropped, how large and likely the crops are.

`collect` generates as `topw generate` does and looks at every step's logits again; `analyse` says what one step's crop
is and would be without distances; `summary` counts; `table` and `plot` show.
"""

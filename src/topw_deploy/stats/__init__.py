"""`topw stats`: where token geometry decided, which tokens it added or dropped, and crop sizes.

- `request`: prompts and settings
- `collect`: generate like `topw generate`, then recompute every step's logits
- `analyse`: compare a step's crop with the crop without distances
- `summary`: counts
- `table`, `plot`: output
"""

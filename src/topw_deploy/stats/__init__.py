"""`topw stats`: where token geometry decided, which tokens it added or dropped, and crop sizes.

- `request`: prompts and settings
- `collect`: generates, then recomputes every step's logits
- `analyse`: compares crops with and without distances
- `summary`: counts
- `table`, `plot`: output
"""

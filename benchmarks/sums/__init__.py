"""A small model that solves word problems with written steps, and its accuracy by sampling rule (docs/lab/sums.md)."""

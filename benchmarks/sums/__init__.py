"""A small model that solves word problems step by step, and its accuracy by sampling rule (docs/lab/results.md)."""

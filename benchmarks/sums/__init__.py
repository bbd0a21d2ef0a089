"""A small model that solves word problems step by step; `topw compare` counts its right answers by sampling rule
(docs/lab/results.md)."""

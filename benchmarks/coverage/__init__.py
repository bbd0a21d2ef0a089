"""Which architectures of transformers' causal-LM map export: docs/models.md."""

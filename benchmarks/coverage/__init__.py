"""Find which architectures of transformers' causal-LM map can be exported, for docs/models.md."""

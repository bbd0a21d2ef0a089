"""GPTQ and AWQ checkpoints of Hugging Face, read as they are (docs/guide/quantisation.md)."""

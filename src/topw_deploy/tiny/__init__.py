"""The bundled model: a small Llama trained on Python's documentation, and that text."""

from __future__ import annotations

from pathlib import Path

TINY_MODEL = Path(__file__).parent / "model"
"""The folder with config.json, model.safetensors (float16), tokenizer.json and the training log."""

"""The bundled model: a small Llama trained on Python's documentation, and that text."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_model_path"]


def tiny_model_path() -> Path:
    """The folder with config.json, model.safetensors (float16), tokenizer.json and the training log."""
    return Path(__file__).parent / "model"

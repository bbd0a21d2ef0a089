"""Checkpoints and decoders of tiny models that several test files read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shared import made_once


def checkpoints_of(factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> its Hugging Face folder, written at the first call."""
    from tests.support.tiny_models import write_checkpoint  # imports torch

    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = write_checkpoint(factory.mktemp("checkpoint") / family, family)
        return made[family]

    return folder


def foreign_decoder_of(factory: pytest.TempPathFactory) -> Path:
    """The folder of another exporter's decoder, with its weights in model.onnx.data."""

    def make(folder: Path) -> None:
        from tests.support.tiny_models import write_decoder  # imports torch

        write_decoder(folder, "llama_tied")

    return made_once(factory, "foreign", make)

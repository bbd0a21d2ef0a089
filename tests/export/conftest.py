"""Exports shared by several test files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> its Hugging Face folder."""
    from tests.support.tiny_models import write_checkpoint  # imports torch

    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family)
        return made[family]

    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """family -> its export with default options, unverified."""
    from topw_deploy.export import ExportRequest, export_model

    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("exported") / family
            export_model(ExportRequest(model=str(checkpoint(family)), output=made[family], verify=False))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def foreign_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder without a sampler, as from another exporter."""
    from tests.support.tiny_models import write_decoder

    return write_decoder(tmp_path_factory.mktemp("foreign") / "llama", "llama_tied")

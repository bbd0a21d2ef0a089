"""Exports shared by several test files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shared import checkpoints_of, foreign_decoder_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function of a family that returns its Hugging Face folder."""
    return checkpoints_of(tmp_path_factory)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """A function of a family that returns its export with default options, which is not verified."""
    from topw_deploy.export import export_model

    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("exported") / family
            export_model(checkpoint(family), made[family], verify=False)
        return made[family]

    return folder


@pytest.fixture
def cold_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify in a new process, as the exporter does; other tests fork a warm one (tests/support/warm_process.py)."""
    from tests.support import warm_process
    from topw_deploy.export.verification import run as in_subprocess

    monkeypatch.setattr(in_subprocess, "start", warm_process.start_new)


@pytest.fixture(scope="session")
def foreign_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder without a sampler, as from another exporter."""
    return foreign_decoder_of(tmp_path_factory)

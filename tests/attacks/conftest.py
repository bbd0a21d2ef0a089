"""Small exports to attack."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shared import checkpoints_of, foreign_decoder_of
from tests.support.toy_model import Toy, export


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy.random(2)


@pytest.fixture(scope="session")
def whole(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact export."""
    return export(
        tmp_path_factory.mktemp("whole") / "export",
        toy,
        form="grouped",
        rules=("top_w",),
        generation_config={"eos_token_id": 1},
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to attack."""
    return Path(shutil.copytree(whole, tmp_path / "export"))


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another exporter's decoder, with its weights in model.onnx.data."""
    return foreign_decoder_of(tmp_path_factory)


@pytest.fixture
def decoder(foreign: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(foreign, tmp_path / "decoder"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function: family of tiny models -> the folder of its Hugging Face checkpoint."""
    return checkpoints_of(tmp_path_factory)

"""Folders that all workers of a test run share: the first that needs one makes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # a GPU host has no pytest
    import pytest

try:
    import fcntl
except ImportError:  # Windows: each worker makes its own
    fcntl = None  # type: ignore[assignment]


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test whose environment is not installed. In CI, which installs it, the test fails."""
    import pytest

    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def root_of_run(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of the whole run; a worker's own is inside it."""
    own = factory.getbasetemp()
    return own.parent if fcntl is not None and "PYTEST_XDIST_WORKER" in os.environ else own


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which one process can at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` has filled; tests only read it."""
    folder = root_of_run(factory) / "shared" / name
    with locked(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.{os.getpid()}")
            make(unfinished)
            unfinished.rename(folder)
    return folder


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

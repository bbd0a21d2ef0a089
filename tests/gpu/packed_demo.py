"""A rehearsed packing's archives and folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import pack
from benchmarks.gpu.archives import unpack
from tests.support.shared import made_once


@pytest.fixture(scope="session")
def packed_demo(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The float16 bundled model with the CPU's tokens."""

    def make(into: Path) -> None:
        assert pack.main(["--only", "folders", "packages", "--limit", "2MiB", "--into", str(into), "--rehearse"]) == 0

    return sorted(made_once(tmp_path_factory, "packed-demo", make).glob("*.tar.xz"))


@pytest.fixture(scope="session")
def demo_folder(packed_demo: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    host = tmp_path_factory.mktemp("host")
    unpack(packed_demo, host)
    return host / "folders" / "float16-gqa"

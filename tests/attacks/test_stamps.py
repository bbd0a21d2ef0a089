"""Engine stamps, and side files of a folder, that must be refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.attacks import put, refused, sparse
from tests.test_manifest import BOMBS
from topw_deploy.errors import ManifestError, TensorRTError
from topw_deploy.runtime import TopWModel
from topw_deploy.tensorrt.stamp import read_stamp


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[" * 1_000_000, b'{"a": 1' + b"0" * 1_000_000 + b"}"], ids=["deep", "long"])
def test_a_bomb_in_another_file_is_refused(folder: Path, name: str, content: bytes) -> None:
    put(folder, name, content)
    with refused(ManifestError, rf"{name} is not JSON"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_stamp_that_is_a_bomb_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gpu.json").write_bytes(content)
    with refused(TensorRTError, "is not an engine's stamp|more than 1048576 bytes"):
        read_stamp(tmp_path / "gpu.json")


def test_a_stamp_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / "gpu.json", 1 << 40)
    with refused(TensorRTError, "more than 1048576 bytes"):
        read_stamp(tmp_path / "gpu.json")


@pytest.mark.parametrize("name", ["../gpu.engine", "/tmp/gpu.engine", "..engine", "gpu.engine\n", "gpu.so", ""])
def test_a_stamp_that_names_another_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"format_version": 1, "engine": name}))
    with refused(TensorRTError, r"matching regex .* - at `\$.engine`"):
        read_stamp(tmp_path / "gpu.json")

"""Manifests and engine stamps that must be refused.

Every wrong field: tests/test_manifest.py and tests/test_manifest_fuzz.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.attacks import many_names, put, refused, sparse
from topw_deploy.errors import ManifestError, TensorRTError
from topw_deploy.manifest import MANIFEST_NAME, load_manifest
from topw_deploy.runtime import TopWModel
from topw_deploy.tensorrt.stamp import read_stamp

BOMBS: dict[str, tuple[bytes, str]] = {
    "lists in lists": (b"[" * 1_000_000, "is not JSON"),
    "objects in objects": (b'{"a":' * 1_000_000, "is not JSON"),
    "an integer of many digits": (b'{"format_version": 1' + b"0" * 1_000_000 + b"}", "an integer of 1000001 digits"),
    "many names, one twice": (many_names(100_000), "the name '99999' is given twice"),
    "NaN": (b'{"format_version": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"format_version": -Infinity}', "-Infinity is not a JSON number"),
    "half a surrogate pair in UTF-8": (b'{"\xed\xa0\x80": 1}', "is not UTF-8"),
    "UTF-16": ('{"format_version": 1}'.encode("utf-16"), "is not UTF-8"),
    "nothing": (b"", "is not JSON"),
    "zero bytes": (bytes(1000), "is not JSON"),
    "a pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.", "is not UTF-8"),
}  # fmt: skip


OUTSIDE = (
    "../secret", "/etc/passwd", "a/../../secret", "C:\\secret", "..\\secret", "a\0b", "", ".", "a//b", "\\\\host\\x",
)  # fmt: skip
"""Names that are not plain paths inside the folder."""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_manifest_that_is_a_bomb_is_refused(folder: Path, bomb: str) -> None:
    content, reason = BOMBS[bomb]
    (folder / MANIFEST_NAME).write_bytes(content)
    with refused(ManifestError, reason):
        load_manifest(folder)


def test_a_manifest_of_a_terabyte_is_not_read(folder: Path) -> None:
    sparse(folder / MANIFEST_NAME, 1 << 40)
    with refused(ManifestError, "is larger than 16777216 bytes"):
        load_manifest(folder)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][name] = {"sha256": "0" * 64, "size": 1}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with refused(ManifestError, "not a plain path inside the folder; do not use this folder"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize(("one", "other"), [("config.json", "Config.JSON"), ("\u00e9", "e\u0301"), ("\u212a", "k")])
def test_names_that_other_systems_take_for_one_are_refused(folder: Path, one: str, other: str) -> None:
    """Case and Unicode normalisation: there, the later file would replace the earlier one."""
    for name in (one, other):
        put(folder, name, "{}")
    with refused(ManifestError, "have one name on other systems"):
        load_manifest(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[" * 1_000_000, b'{"a": 1' + b"0" * 1_000_000 + b"}"], ids=["deep", "long"])
def test_a_bomb_in_another_file_is_refused(folder: Path, name: str, content: bytes) -> None:
    put(folder, name, content)
    with refused(ManifestError, rf"{name} is not JSON"):
        TopWModel.from_pretrained(folder, provider="cpu")


@pytest.mark.parametrize("content", [content for content, _ in BOMBS.values()], ids=list(BOMBS))
def test_a_stamp_that_is_a_bomb_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gpu.json").write_bytes(content)
    with refused(TensorRTError, "is not an engine's stamp|more than 1048576 bytes"):
        read_stamp(tmp_path / "gpu.json")


def test_a_stamp_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / "gpu.json", 1 << 40)
    with refused(TensorRTError, "more than 1048576 bytes"):
        read_stamp(tmp_path / "gpu.json")


@pytest.mark.parametrize(
    "name", ["../gpu.engine", "/tmp/gpu.engine", "a/gpu.engine", "..engine", "gpu.engine\n", "gpu.so", ""]
)
def test_a_stamp_that_names_another_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"format_version": 1, "engine": name}))
    with refused(TensorRTError, r"matching regex .* - at `\$.engine`"):
        read_stamp(tmp_path / "gpu.json")

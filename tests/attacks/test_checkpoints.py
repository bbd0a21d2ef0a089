"""Checkpoints that must be refused, and code in them that must not run.

Pipes, sockets and devices: tests/export/source/test_source_files.py. Pickles: tests/export/source/test_torch_files.py.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import refused, safetensors, sparse
from tests.support.samples import broad
from topw_deploy.errors import SourceError, TopWError
from topw_deploy.export.source.files import stored_tensors

pytestmark = pytest.mark.slow
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HUGE = 10**399
MANY_AXES = b'{"a":{"dtype":"I64","data_offsets":[0,0],"shape":[' + b",".join([b"9" * 400] * 30_001) + b"]}}"
ONE = b'{"a":{"dtype":"U8","shape":[%b],"data_offsets":[0,%b]}}'
FILES: dict[str, tuple[bytes, str]] = {
    "two tensors in the same bytes": (
        safetensors({"a": tensor(0, 8), "b": tensor(0, 8)}, bytes(8)),
        "'b' begins at 0, within 'a', which ends at 8",
    ),
    "a tensor beyond the file": (safetensors({"a": tensor(0, 8)}, bytes(7)), "but its last tensor ends at"),
    "a tensor at 2**62": (safetensors({"a": tensor(1 << 62, (1 << 62) + 1)}, bytes(8)), "ends at 4611686018427388009"),
    "data after the last tensor": (safetensors({"a": tensor(0, 8)}, bytes(9)), "but its last tensor ends at"),
    "axes whose product overflows": (
        safetensors({"a": tensor(0, 0, [1 << 32, 1 << 32])}),
        "has more than 92233",
    ),
    "axes whose product wraps": (safetensors({"a": tensor(0, 40, [5, (1 << 61) + 1])}, bytes(40)), "has more than"),
    "an axis of 2**63": (safetensors({"a": tensor(0, 0, [1 << 63])}), "9223372036854775807|out of range"),
    "an empty axis beside a huge one": (
        safetensors({"a": tensor(0, 0, [0, HUGE])}),
        "9223372036854775807|out of range",
    ),
    "a million axes of 400 digits": (safetensors(MANY_AXES), "out of range|length <= 32"),
    "a negative axis": (safetensors({"a": tensor(0, 0, [-5])}), "the entry of 'a'"),
    "true as an axis": (safetensors(ONE % (b"true", b"1"), b"1"), "the entry of 'a'"),
    "an offset of 1e400": (safetensors(ONE % (b"1", b"1e400"), b"1"), "the entry of|out of range"),
    "a type of nobody": (safetensors({"a": tensor(0, 1, dtype="os.system")}, b"1"), "'a': 1 bytes for 'os.system'"),
    "negative offsets": (safetensors({"a": tensor(-8, 0, [8])}, bytes(8)), "the entry of 'a'"),
    "offsets that go back": (safetensors({"a": tensor(8, 0, [8])}, bytes(8)), "'a': -8 bytes"),
    "lists in lists": (safetensors(b"[" * 1_000_000), "got `array`"),
    "objects in objects": (safetensors(b'{"a":' * 1_000_000), "nested too deeply"),
    "an integer of a million digits": (safetensors(b'{"a":1' + b"0" * 1_000_000 + b"}"), "out of range"),
    "a header of 2**64 - 1 bytes": (safetensors(b"{}", length=(1 << 64) - 1), "claims 18446744073709551615 bytes"),
    "a header longer than the file": (safetensors(b"{}", length=3), "its header claims 3 bytes"),
    "NaN": (safetensors(b'{"a":NaN}'), "malformed"),
    "nothing": (b"", "it has 0 bytes"),
    "a pickle": (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.", "its header claims"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_header_with_wrong_ranges_or_sizes_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = FILES[name]
    (tmp_path / SINGLE).write_bytes(content)
    with refused(SourceError, reason):
        stored_tensors(tmp_path)


def test_a_header_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / SINGLE, 1 << 40)
    with (tmp_path / SINGLE).open("r+b") as stream:
        stream.write((1 << 39).to_bytes(8, "little"))
    with refused(SourceError, "its header claims 549755813888 bytes"):
        stored_tensors(tmp_path)


INDEXES: dict[str, tuple[bytes, str]] = {
    "a file outside": (b'{"weight_map": {"a": "../../../etc/passwd"}}', "lists passwd, which is missing"),
    "an absolute path": (b'{"weight_map": {"a": "/dev/zero"}}', "lists zero, which is missing"),
    "the folder above": (b'{"weight_map": {"a": ".."}}', r"is not a safetensors file|Is a directory"),
    "a pipe": (b'{"weight_map": {"a": "pipe"}}', "it is a named pipe, not a regular file"),
    "a device": (b'{"weight_map": {"a": "device"}}', "it is a device, not a regular file"),
    "lists in lists": (b"[" * 1_000_000, "is damaged"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_names_another_file_is_refused(tmp_path: Path, name: str) -> None:
    content, reason = INDEXES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_bytes(content)
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    with refused(SourceError, reason):
        stored_tensors(folder)


def test_an_index_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / INDEX, 1 << 40)
    with refused(SourceError, "it has more than 104857600 bytes"):
        stored_tensors(tmp_path)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    """A zip bomb: a few kilobytes that unpack to a thousand times as much, here a little one."""
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(8 << 20))
    with refused(SourceError, "compressed records"):
        stored_tensors(tmp_path)


def test_an_archive_of_an_unknown_version_or_with_a_huge_byte_order_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/byteorder", b"little" + b" " * 100)
    with refused(SourceError, "or is damaged"):
        stored_tensors(tmp_path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 6] = 255  # version needed to extract
    path.write_bytes(content)
    with refused(SourceError, "or is damaged"):
        stored_tensors(tmp_path)


MODULE = "open({witness!r}, 'w').close()\nraise RuntimeError('the code ran')\n"


@pytest.mark.parametrize(
    "part",
    ["config.json", pytest.param("tokenizer_config.json", marks=pytest.mark.long), broad("generation_config.json")],
)  # fmt: skip
def test_code_of_a_checkpoint_does_not_run(checkpoint: Callable[[str], Path], tmp_path: Path, part: str) -> None:
    """auto_map, custom_generate and modules with names that transformers uses; only --trust-remote-code runs them."""
    from topw_deploy.export import export_model

    folder, witness = Path(shutil.copytree(checkpoint("llama_tied"), tmp_path / "model")), tmp_path / "witness"
    for name in ("evil.py", "generate.py", "custom_generate/generate.py", "modeling_llama.py", "sitecustomize.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(MODULE.format(witness=str(witness)))
    path = folder / part
    data = json.loads(path.read_text()) if path.exists() else {}
    auto = {
        f"Auto{kind}": "evil.Evil" for kind in ("Config", "ModelForCausalLM", "Model", "GenerationConfig", "Processor")
    }
    data |= {"auto_map": {**auto, "AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "custom_generate": "evil"}
    data |= {"custom_pipelines": {"text-generation": {"impl": "evil.Evil", "pt": ["AutoModelForCausalLM"]}}}
    if part == "config.json":
        data["model_type"] = "evil"
    path.write_text(json.dumps(data))
    if part == "config.json":
        with refused(TopWError, "trust|not recogni[sz]e|unknown|evil"):
            export_model(folder, tmp_path / "out", verify=False)
    else:
        export_model(folder, tmp_path / "out", verify=False)
    assert not witness.exists()

"""Session files that must be refused. Every way in which a field can be wrong: tests/engine/test_session_file.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_session_file import FORM, TOKENS, header_of, states_of
from tests.support.attacks import refused, safetensors, sparse
from topw_deploy.engine.session_file import read_session, write_session
from topw_deploy.errors import SessionFileError

HUGE = 10**399


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_session(tmp_path / "session", FORM, TOKENS, states_of(5))
    return tmp_path / "session"


def entry(shape: list[int], begin: int = 0, end: int = 0) -> dict[str, Any]:
    return {"tokens": {"dtype": "I64", "shape": shape, "data_offsets": [begin, end]}}


HEADERS: dict[str, tuple[bytes, str]] = {
    "lists in lists": (safetensors(b"[" * 1_000_000), "got `array`"),
    "objects in objects": (safetensors(b'{"a":' * 1_000_000), "nested too deeply"),
    "an integer of a million digits": (safetensors(b'{"a":1' + b"0" * 1_000_000 + b"}"), "out of range"),
    "NaN": (safetensors(b'{"a":NaN}'), "malformed"),
    "a header of 2**64 - 1 bytes": (safetensors(b"{}", length=(1 << 64) - 1), "its header claims 18446744073709551615"),
    "a header longer than the file": (safetensors(b"{}", length=3), "its header claims 3 bytes"),
    "a million axes of 400 digits": (
        safetensors(
            b'{"tokens":{"dtype":"I64","data_offsets":[0,0],"shape":[' + b",".join([b"9" * 400] * 30_001) + b"]}}"
        ),
        "out of range|length <= 32",
    ),
    "axes whose product overflows": (safetensors(entry([1 << 32, 1 << 32])), "9223372036854775807|out of range"),
    "an axis of 2**63": (safetensors(entry([1 << 63])), "9223372036854775807|out of range"),
    "an empty axis beside a huge one": (safetensors(entry([0, HUGE])), "9223372036854775807|out of range"),
    "axes whose product wraps to 40": (safetensors(entry([5, (1 << 61) + 1], 0, 40), bytes(40)), "has more than"),
    "a negative axis": (safetensors(entry([-5])), "the entry of 'tokens'"),
    "offsets that go back": (safetensors(entry([5], 40, 0)), "-40 bytes"),
    "negative offsets": (safetensors(entry([5], -40, 0)), "the entry of 'tokens'"),
    "true as an axis": (safetensors(b'{"tokens":{"dtype":"I64","shape":[true],"data_offsets":[0,8]}}'), "the entry of"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_a_bomb_is_refused(path: Path, name: str) -> None:
    content, reason = HEADERS[name]
    if name not in ("lists in lists", "objects in objects") and b'"tokens"' in content:
        length = int.from_bytes(content[:8], "little")
        metadata = header_of(path.read_bytes())[0]["__metadata__"]
        text = b'{"__metadata__":' + json.dumps(metadata).encode() + b"," + content[9 : 8 + length]
        content = safetensors(text, content[8 + length :])
    path.write_bytes(content)
    with refused(SessionFileError, reason):
        read_session(path, FORM)


def test_a_header_above_the_limit_is_not_read(path: Path) -> None:
    sparse(path, 1 << 40)
    with path.open("r+b") as stream:
        stream.write((1 << 39).to_bytes(8, "little"))
    with refused(SessionFileError, "its header claims 549755813888 bytes"):
        read_session(path, FORM)

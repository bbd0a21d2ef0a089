"""Session files that must be refused.

Their headers are read as those of checkpoints (tests/attacks/test_checkpoints.py). Every way in which a field can be
wrong: tests/engine/test_session_file.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_session_file import FORM
from tests.support.attacks import refused, safetensors, sparse
from topw_deploy.engine.session_file import read_session
from topw_deploy.errors import SessionFileError


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (safetensors(b"[" * 1_000_000), "got `array`"),
        (safetensors(b'{"a":' * 1_000_000), "nested too deeply"),
        (safetensors(b"{}", length=(1 << 64) - 1), "its header claims 18446744073709551615"),
    ],
    ids=["lists in lists", "objects in objects", "a header of 2**64 - 1 bytes"],
)
def test_a_header_that_is_a_bomb_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "session").write_bytes(content)
    with refused(SessionFileError, reason):
        read_session(tmp_path / "session", FORM)


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "session"
    sparse(path, 1 << 40)
    with path.open("r+b") as stream:
        stream.write((1 << 39).to_bytes(8, "little"))
    with refused(SessionFileError, "its header claims 549755813888 bytes"):
        read_session(path, FORM)

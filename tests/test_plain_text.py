"""Bytes of prompts become text."""

from __future__ import annotations

import pytest

from topw_deploy.errors import PromptError
from topw_deploy.plain_text import decode_text


def test_a_byte_order_mark_is_no_text() -> None:
    assert decode_text("\ufeffdef".encode(), "p.txt") == "def"
    assert decode_text("a\ufeffb".encode(), "p.txt") == "a\ufeffb"  # a joiner elsewhere


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-16", r"p.txt is not UTF-8 text \(byte 0\); it looks like UTF-16, save it as UTF-8"),
        ("utf-32", r"p.txt is not UTF-8 text \(byte 0\); it looks like UTF-32, save it as UTF-8"),
        ("utf-16-le", r"p.txt is not UTF-8 text \(byte 6\); it looks like UTF-16, save it as UTF-8"),
        ("latin-1", r"p.txt is not UTF-8 text \(byte 3\); convert it first"),
    ],
)
def test_another_encoding_is_named_where_it_can_be(encoding: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        decode_text("café".encode(encoding), "p.txt")


def test_zero_bytes_are_no_text() -> None:
    with pytest.raises(PromptError, match=r"p\.txt holds a zero byte, so it is not text or is UTF-16; save it"):
        decode_text("ab".encode("utf-16-le"), "p.txt")

"""Bytes of prompts become text, and text controls no terminal."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest

from topw_deploy.errors import ParameterError, PromptError
from topw_deploy.text import decimal_size, decode_text, json_text, parse_size, printable


def test_a_byte_order_mark_at_the_start_is_dropped() -> None:
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
def test_the_message_names_another_encoding_if_it_is_recognised(encoding: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        decode_text("café".encode(encoding), "p.txt")


def test_zero_bytes_are_no_text() -> None:
    with pytest.raises(PromptError, match=r"p\.txt holds a zero byte, so it is not text or is UTF-16; save it"):
        decode_text("ab".encode("utf-16-le"), "p.txt")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x7f\x00\x07", r"\x7f\x00\x07"),
        ("\x9b2J", r"\x9b2J"),  # C1's own "ESC ["
        ("user\u202egnp.exe", r"user\u202egnp.exe"),
        ("\u2066a\u2069\u2028\u2029", r"\u2066a\u2069\u2028\u2029"),
        ("o\udcff", r"o\udcff"),
    ],
)
def test_characters_that_control_a_terminal_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["plain", "grüße", "مرحبا", "שלום", "👩‍👩‍👧", "C:\\new\\table", "100 %", "a b"])
def test_letters_of_every_script_stay(text: str) -> None:
    assert printable(text) == text


def test_every_control_character_is_escaped() -> None:
    controls = [chr(n) for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)) in ("Cc", "Cs", "Zl", "Zp")]
    assert len(controls) == 65 + 2048 + 2
    assert all(printable(character).isprintable() for character in controls)


def test_characters_to_keep_are_not_escaped() -> None:
    assert printable("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_json_reads_back_the_same_and_controls_nothing(indent: int | None, ascii_only: bool) -> None:
    document = {"a\x9b": ["\x1b[2J\x7f\n\t", "\u202e\u2028", "o\udcff", 'é"\\'], "n": 1.5}
    text = json_text(document, indent=indent, ascii_only=ascii_only)
    assert json.loads(text) == document
    assert all(character == "\n" or printable(character) == character for character in text)
    assert ("é" in text) is not ascii_only


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1_000, "1.0 kB"), (20_300_000, "20.3 MB"), (999_940_000, "999.9 MB"),
     (999_960_000, "1.0 GB"), (5_200_000_000, "5.2 GB"), (2**60, "1152921.5 TB")],
)  # fmt: skip
def test_a_size_is_shown_in_the_largest_unit_of_at_least_one(size: int, text: str) -> None:
    assert decimal_size(size) == text


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GB", 2**63, "9300000TB"])
def test_a_size_of_2_to_the_63_bytes_or_more_is_refused(size: int | str) -> None:
    with pytest.raises(
        ParameterError, match=r"^the size is .{1,60}, but must be a positive number of bytes below 2\^63"
    ):
        parse_size(size)

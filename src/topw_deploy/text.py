"""Text: decode prompts, escape control characters, and format counts, sizes and values for messages."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from topw_deploy.errors import ParameterError, PromptError

_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
          codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}  # fmt: skip
# Control characters (C0, DEL, C1), line and paragraph separators, bidirectional overrides and isolates, and lone
# surrogates, which Python puts into file names that are not UTF-8.
_UNSAFE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_LONGEST_REPR = 60  # characters
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST = float(1 << 63)  # bytes; offsets in files have 63 bits
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]b|[kmg]ib|)", re.IGNORECASE)


def decode_text(data: bytes, where: str) -> str:
    """Decode UTF-8, and drop a byte order mark. where: the name of the source in messages.

    Raises PromptError for other encodings and for zero bytes.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "UTF-16" * (b"\0" in data))
        cure = f"it looks like {encoding}, save it as UTF-8" if encoding else "convert it first"
        raise PromptError(f"{where} is not UTF-8 text (byte {error.start}); {cure}.") from None
    if "\0" in text:
        raise PromptError(f"{where} holds a zero byte, so it is not text or is UTF-16; save it as UTF-8.")
    return text


def numbered_lines(data: bytes, where: str) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) for each line that is not blank. Only a line feed ends a line.

    Raises the errors of `decode_text`.
    """
    for number, line in enumerate(decode_text(data, where).split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def printable(text: object, keep: str = "") -> str:
    """Return `text` with control characters as escapes such as `\\x1b`. keep: characters that are not escaped."""

    def escape(found: re.Match[str]) -> str:
        character, number = found[0], ord(found[0])
        code = f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
        return character if character in keep else _SHORT.get(character, code)

    return _UNSAFE.sub(escape, str(text))


def json_text(document: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """Return `document` as JSON with escaped control characters. Values of other types than JSON's become strings."""
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only, default=str)
    # Apart from the line breaks of `indent`, these characters occur only inside strings, where JSON allows escapes.
    return _UNSAFE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def short_repr(value: Any) -> str:
    """Return the repr of a value for messages, shortened to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def count_text(number: int, word: str) -> str:
    """Return a number with its noun: `1 prompt`, `2 prompts`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def parse_size(size: int | str, name: str = "the size") -> int:
    """Return the bytes of a size: a number, `500MB` (10^6), `2GB` (10^9), `2GiB` (2^30), ...

    name: the parameter in messages.
    Raises ParameterError for anything else, and from 2^63 bytes on.
    """
    match = _SIZE.fullmatch(str(size).strip())
    found = 0.0 if match is None else float(match[1]) * _UNITS[match[2].upper()]
    if not 0.5 < found < _MOST:
        raise ParameterError(
            f"{name} is {size!r:.60}, but must be a positive number of bytes below 2^63, such as 500MB or 2GB.",
            name,
        )
    return round(found)


def decimal_size(count: float) -> str:
    """Format a size in powers of 1000: `17 bytes`, `20.3 MB`, `1.2 GB`."""
    text = f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        if round(count, 1) < 1000:
            break
        count /= 1000
        text = f"{count:.1f} {unit}"
    return text

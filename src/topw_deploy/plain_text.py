"""Decode prompt text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from topw_deploy.errors import PromptError

_MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
          codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}  # fmt: skip


def decode_text(data: bytes, where: str) -> str:
    """Decode UTF-8 and drop a byte order mark. where: the source, for messages.

    Raises PromptError for other encodings and zero bytes.
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
    """Non-blank lines, numbered from 1; only line feeds end lines.

    Raises PromptError like `decode_text`.
    """
    for number, line in enumerate(decode_text(data, where).split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")

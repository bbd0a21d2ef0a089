"""Print the output of commands: `say` prints results to stdout, `tell` prints everything else to stderr.

Both escape control characters, so that models, files and arguments cannot control the terminal.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from topw_deploy.text import json_text, printable


def say(*lines: object) -> None:
    """Print lines to stdout."""
    write("".join(f"{printable(line)}\n" for line in lines))


def tell(*lines: object, end: str = "\n") -> None:
    """Print lines to stderr."""
    sys.stderr.write("".join(f"{printable(line)}{end}" for line in lines))
    sys.stderr.flush()


def rewrite_line(line: str) -> None:
    """Replace the text on the terminal's current line, which `rewrite_line` printed, on stderr."""
    sys.stderr.write(f"\r{printable(line)}\033[K")
    sys.stderr.flush()


def say_json(document: Any, *, indent: int | None = None) -> None:
    """Print JSON, in ASCII unless stdout's encoding is Unicode."""
    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    write(json_text(document, indent=indent, ascii_only=not unicode) + "\n")


def write(text: str) -> None:
    """Write `text` to stdout unchanged."""
    sys.stdout.write(text)
    sys.stdout.flush()


class GeneratedText:
    """Writes generated text to stdout, unchanged to files and pipes.

    On terminals, control characters except line feeds and tabs are escaped, and CR LF becomes LF.
    """

    def __init__(self) -> None:
        self._escapes = sys.stdout.isatty()
        self._held = ""  # a CR that may be the first half of CR LF

    def add(self, text: str) -> None:
        """Write the next part of a sequence's text."""
        if not self._escapes:
            write(text)
            return
        text = (self._held + text).replace("\r\n", "\n")
        self._held = "\r" if text.endswith("\r") else ""
        write(printable(text.removesuffix("\r"), keep="\n\t"))

    def end(self) -> None:
        """End the line of the sequence."""
        held, self._held = self._held, ""
        write(f"{printable(held)}\n")


def prepare_streams() -> bool:
    """Prepare the standard streams. Returns False if stdout is closed.

    A closed stderr becomes the null device. Otherwise the next file that is opened would get descriptor 2, and with it
    what native libraries print.
    """
    if sys.stderr is None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None:
        return False
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # writes ? for characters that the encoding lacks
    return True

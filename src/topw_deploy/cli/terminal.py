"""The only place that prints. `say` writes results to stdout, `tell` everything else to stderr, a line for each
argument; what came with a model, a file or the command line cannot move the cursor, recolour or reorder a line."""

from __future__ import annotations

import os
import sys
from typing import Any

from topw_deploy.printable import json_text, printable


def say(*lines: object) -> None:
    """Print each argument as a line of stdout."""
    write("".join(f"{printable(line)}\n" for line in lines))


def tell(*lines: object, end: str = "\n") -> None:
    """Print each argument as a line of stderr."""
    sys.stderr.write("".join(f"{printable(line)}{end}" for line in lines))
    sys.stderr.flush()


def rewrite_line(line: str) -> None:
    """Put `line` in place of the last line of stderr, a terminal."""
    sys.stderr.write(f"\r{printable(line)}\033[K")
    sys.stderr.flush()


def say_json(document: Any, *, indent: int | None = None) -> None:
    """Print `document` as JSON, in ASCII where stdout does not take Unicode: no character is lost."""
    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    write(json_text(document, indent=indent, ascii_only=not unicode) + "\n")


def write(text: str) -> None:
    """Write `text` to stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


class GeneratedText:
    """Writes what a model generates to stdout: unchanged to files and pipes. On a terminal characters that control it
    are escaped, but for line feeds and tabs; a line may end with CR LF."""

    def __init__(self) -> None:
        self._escapes = sys.stdout.isatty()
        self._held = ""  # a CR, of which the next text says whether it belongs to a line's end

    def add(self, text: str) -> None:
        if not self._escapes:
            write(text)
            return
        text = (self._held + text).replace("\r\n", "\n")
        self._held = "\r" if text.endswith("\r") else ""
        write(printable(text.removesuffix("\r"), keep="\n\t"))

    def end(self) -> None:
        """End the sequence and its line."""
        held, self._held = self._held, ""
        write(f"{printable(held)}\n")


def prepare() -> bool:
    """Make the standard streams ready for `say` and `tell`. False where stdout is closed.

    A closed stderr becomes the null device, so that no file that is opened later takes its number and receives what
    native libraries print.
    """
    if sys.stderr is None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None:
        return False
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no emoji shows something else
    return True

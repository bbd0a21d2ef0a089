"""Files of prompts as commands read them."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from topw_deploy.errors import PromptError


def read_source(path: Path) -> tuple[bytes, str]:
    """The bytes of a file, or of standard input for `-`, and its name for messages.

    Raises PromptError where the file cannot be read, click's UsageError where standard input is closed.
    """
    if str(path) == "-":
        if sys.stdin is None:  # it was closed
            raise click.UsageError("standard input is closed; give a file.")
        return sys.stdin.buffer.read(), "standard input"
    try:
        return path.read_bytes(), str(path)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}.") from None

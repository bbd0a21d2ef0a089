"""Print the output of commands: `say` prints results to stdout, `tell` prints everything else to stderr.

Both escape control characters, so that models, files and arguments cannot control the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from topw_deploy.errors import ParameterError
from topw_deploy.progress import SILENT, Advance, Progress
from topw_deploy.text import json_text, printable


def say(*lines: object) -> None:
    """Print lines to stdout."""
    write("".join(f"{printable(line)}\n" for line in lines))


def tell(*lines: object, end: str = "\n") -> None:
    """Print lines to stderr, below the line of a stage that has not ended."""
    begin, Stages.open_line = "\n" * Stages.open_line, False
    sys.stderr.write(begin + "".join(f"{printable(line)}{end}" for line in lines))
    sys.stderr.flush()


class Stages:
    """Prints the stages of a long call to stderr, and the seconds of each when it ends: `Tracing: 3.1 s`.

    details: the lines that begin with a space. They are printed only if `verbose`.
    seconds: of each stage that has ended.
    """

    open_line = False  # whether the last line on stderr is a stage's, without its seconds

    def __init__(self, *, verbose: bool = False) -> None:
        self.details: list[str] = []
        self.seconds: dict[str, float] = {}
        self._verbose, self._stage, self._started = verbose, "", 0.0

    def say(self, line: str) -> None:
        """Begin a stage, or take a detail of the current one."""
        if line.startswith(" "):
            self.details.append(line)
            if self._verbose:
                tell(line)
            return
        self.end()
        tell(line, end="")
        Stages.open_line, self._stage, self._started = True, line, time.monotonic()

    def end(self) -> None:
        """Print the seconds of the current stage, on its line or, if others were printed since, on a new one."""
        if self._stage:
            self.seconds[self._stage] = seconds = time.monotonic() - self._started
            name = "" if Stages.open_line else self._stage
            self._stage, Stages.open_line = "", False
            tell(f"{name}: {seconds:.1f} s")


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

    def add(self, text: str, *, dim: bool = False) -> None:
        """Write the next part of a sequence's text. dim: write it dimmed on a terminal."""
        if not self._escapes:
            write(text)
            return
        text = (self._held + text).replace("\r\n", "\n")
        self._held = "\r" if text.endswith("\r") else ""
        shown = printable(text.removesuffix("\r"), keep="\n\t")
        write(click.style(shown, dim=True) if dim and shown and "NO_COLOR" not in os.environ else shown)

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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    if sys.stdout is None:
        return False
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # writes ? for characters that the encoding lacks
    return True


def read_source(path: Path) -> tuple[bytes, str]:
    """Read a file, or stdin for `-`. Returns (bytes, name for error messages).

    Raises OSError for an unreadable file, and UsageError if stdin is closed.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise click.UsageError("standard input is closed; give a file.")
        return sys.stdin.buffer.read(), "standard input"
    return path.read_bytes(), str(path)


def check_output(path: Path | None, name: str) -> None:
    """Check before a long run that `path` can be written. `-` is stdout; None is not written.

    name: the parameter that holds `path`, for error messages.

    Raises ParameterError for a folder, a missing parent folder and a read-only location.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise ParameterError(f"{name} is {path}, which is a folder; choose another name.", name)
    if not path.parent.is_dir():
        raise ParameterError(f"{name} is {path}, but {path.parent} is not a folder; choose another name.", name)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ParameterError(f"{name} is {path}, which cannot be written; choose another name.", name)


def check_picture(path: Path | None, endings: tuple[str, ...]) -> None:
    """Check before a long run that the picture of --plot can be written.

    Raises ParameterError as `check_output`, for a name with another ending than `endings`, and without matplotlib.
    """
    if path is None:
        return
    check_output(path, "plot")
    if path.suffix.lower() not in endings:
        raise ParameterError(f"plot is {path}, but must end in {' or '.join(endings)}; choose another name.", "plot")
    from topw_lab.plots import require_matplotlib

    require_matplotlib()


def write_report(lines: Iterable[object], document: Any, json_file: Path | None) -> None:
    """Print the lines of a report, then write it as JSON. `-` prints the JSON instead; None writes none.

    Lines are printed first, so that they are not lost if the disk is full.
    """
    if str(json_file) == "-":
        say_json(document, indent=2)
        return
    say(*lines)
    if json_file is not None:
        json_file.write_text(json_text(document, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def bar(total: int, unit: str, *, done: int = 0) -> Iterator[Advance]:
    """A progress bar on terminals. done: parts that are done at the start."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _parts: None
        return
    tell()  # the bar needs a line of its own
    is_share = unit in ("B", "%")
    label = "" if is_share else unit
    with click.progressbar(length=total, label=label, show_pos=not is_share, file=sys.stderr) as shown:
        shown.update(done)
        yield shown.update


def progress(quiet: bool, say: Callable[[str], object] = tell) -> Progress:
    """The progress callbacks of a command, which do nothing if `quiet`. say: prints a line of text."""
    return SILENT if quiet else Progress(say, bar)

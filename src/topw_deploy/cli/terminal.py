"""Print the output of commands: `say` prints results to stdout, `tell` prints everything else to stderr.

Both escape control characters, so that models, files and arguments cannot control the terminal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
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
    write_stderr(begin + "".join(f"{printable(line)}{end}" for line in lines))


def write_stderr(text: str) -> None:
    """Write `text` to stderr unchanged."""
    with _moving.hidden():
        sys.stderr.write(text)
        sys.stderr.flush()


class _MovingLine:
    """The last line on a terminal: what runs, how much of it is done, and for how many seconds it has been running.

    It appears when nothing has been printed for QUIET seconds, and is removed before something is. It is shown on a
    terminal only.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._text, self._share = "", lambda: ""
        self._began = self._printed = 0.0
        self._is_shown = False

    @contextlib.contextmanager
    def show(self, text: str = "", share: Callable[[], str] = lambda: "") -> Iterator[None]:
        """Show what runs in the block.

        text: what runs; "" for the text of the block around this one.
        share: returns how much of it is done, as text.
        """
        if sys.stderr is None or not sys.stderr.isatty():
            yield
            return
        with self._lock:
            outer = self._text, self._share, self._began
            self._text, self._share, self._began = text or self._text, share, time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="topw-line", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self.hidden():
                self._text, self._share, self._began = outer

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the line, and keep it away while the block prints."""
        with self._lock:
            if self._is_shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._is_shown = False
            yield
            self._printed = time.monotonic()

    def _main(self) -> None:
        while True:
            time.sleep(_TICK)
            with self._lock:
                now = time.monotonic()
                share = self._share()
                if (self._text or share) and now - max(self._printed, self._began) >= QUIET:
                    parts = ", ".join(filter(None, (share, f"{now - self._began:.0f} s")))
                    line = ": ".join(filter(None, (printable(self._text), parts)))
                    sys.stderr.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K")
                    sys.stderr.flush()
                    self._is_shown = True


QUIET = 2.0
"""Seconds without output after which a terminal shows what runs."""

_TICK = 0.5
_moving = _MovingLine()
waiting = _moving.show


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
        self._shown = contextlib.ExitStack()

    def say(self, line: str) -> None:
        """Begin a stage, or take a detail of the current one."""
        if line.startswith(" "):
            self.details.append(line)
            if self._verbose:
                tell(line)
            return
        self.end()
        self._stage, self._started = line, time.monotonic()
        if sys.stderr.isatty():
            self._shown.enter_context(waiting(line))
        else:
            tell(line, end="")
            Stages.open_line = True

    def hide(self) -> None:
        """Remove the moving line of the current stage."""
        self._shown.close()

    def end(self) -> None:
        """Print the seconds of the current stage, on its line or, if others were printed since, on a new one."""
        self.hide()
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
    with _moving.hidden():
        sys.stdout.write(text)
        sys.stdout.flush()


def write_generated(text: str, *, dim: bool = False) -> None:
    """Write generated text to stdout, unchanged to files and pipes. dim: write it dimmed on a terminal.

    On terminals, control characters except line feeds and tabs are escaped, and CR LF becomes LF.
    """
    if sys.stdout.isatty():
        text = printable(text.replace("\r\n", "\n"), keep="\n\t")
        text = click.style(text, dim=True) if dim and text and "NO_COLOR" not in os.environ else text
    write(text)


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
    """Show in a terminal's last line how much of a block is done. done: parts that are done at the start."""
    count = done

    def advance(parts: int) -> None:
        nonlocal count
        count += parts

    def share() -> str:
        return f"{100 * count / max(total, 1):.0f} %" if unit in ("B", "%") else f"{count:,} of {total:,} {unit}"

    with waiting(share=share):
        yield advance


def progress(quiet: bool, say: Callable[[str], object] = tell) -> Progress:
    """The progress callbacks of a command, which do nothing if `quiet`. say: prints a line of text."""
    return SILENT if quiet else Progress(say, bar)

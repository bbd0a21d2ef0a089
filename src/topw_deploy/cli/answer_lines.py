"""Append-only JSON lines of `topw generate --prompts-jsonl`, in prompt order.

A crash damages only the last line. Each line has the prompt's index, digests of request and model, and the run's seed,
so that a run can resume.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from topw_deploy.errors import ParameterError

_START = b'{"index": '  # first bytes of every line
# Characters that some readers, such as str.splitlines, take for line breaks; json already escapes the others.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
_SEEDS = 1 << 64  # seeds are below it (docs/contract/random.md)
_SYNC_SECONDS = 1.0  # minimum time between disk syncs


@dataclass(frozen=True, slots=True)
class Finished:
    """Results of an interrupted run.

    prompts: number of finished prompts.
    failed: number of finished prompts whose lines hold an error.
    size: bytes of the lines of finished prompts.
    run_seed: None if no prompt is finished.
    """

    prompts: int = 0
    failed: int = 0
    size: int = 0
    run_seed: int | None = None


def check_answers(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ParameterError if `path` must not be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ParameterError(f"{path} is a folder, or its folder does not exist; choose another name.")
    if path.exists() and not path.is_file():
        raise ParameterError(f"{path} is not a regular file; omit --output to write to standard output.")
    if path.exists() and not (resume or overwrite):
        raise ParameterError(f"{path} exists; continue it with --resume, or replace it with --overwrite.")


def read_finished(path: Path, requests: Sequence[str], samples: Sequence[int], model: str) -> Finished:
    """Read the results of an interrupted run, ignoring incomplete lines and prompts.

    requests: digest of each prompt's request.
    samples: number of sequences of each request.
    model: digest of the model.
    Raises ParameterError if the file comes from other input, parameters or another model, or has another format.
    """
    if not path.exists():
        return Finished()
    finished, place, seen = Finished(), 0, 0
    *lines, unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        found = _parsed(line)
        _check(found, f"line {number} of {path}", finished.prompts, requests, model, finished.run_seed)
        place += len(line) + 1
        seen += 1
        error = "error" in found
        if error or seen == samples[finished.prompts]:
            finished, seen = Finished(finished.prompts + 1, finished.failed + error, place, found["run_seed"]), 0
    if not unfinished.startswith(_START[: len(unfinished)]):
        raise ParameterError(f"the end of {path} was not written by this command; choose another --output.")
    return finished


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check(found: Any, place: str, index: int, requests: Sequence[str], model: str, run_seed: int | None) -> None:
    advice = "give the same input and options as before, or start again with --overwrite"
    if not isinstance(found, dict) or not {"index", "request", "model", "run_seed"} <= found.keys():
        raise ParameterError(f"{place} was not written by this command; choose another --output.")
    if found["model"] != model:
        raise ParameterError(f"{place} was made with another model; {advice}.")
    if index >= len(requests):
        raise ParameterError(f"{place} answers a prompt that the input lacks, which has {len(requests)}; {advice}.")
    if found["index"] != index or found["request"] != requests[index]:
        raise ParameterError(f"{place} answers another prompt, or one with other parameters; {advice}.")
    seed = found["run_seed"]
    if type(seed) is not int or not 0 <= seed < _SEEDS:
        raise ParameterError(f"{place} has the run_seed {seed!r:.60}, not an integer in [0, 2**64); {advice}.")
    if run_seed not in (None, seed):
        raise ParameterError(f"{place} has another run_seed than the lines before it; {advice}.")


class AnswerFile:
    """A context that writes lines to `path` (None: stdout), after its first `size` bytes."""

    def __init__(self, path: Path | None, size: int = 0) -> None:
        self._path, self._size = path, size
        self._synced = time.monotonic()

    def __enter__(self) -> AnswerFile:
        self._stream: BinaryIO = sys.stdout.buffer if self._path is None else self._open(self._path)
        return self

    def _open(self, path: Path) -> BinaryIO:
        try:
            stream = path.open("r+b" if path.exists() else "xb")
        except OSError as error:
            raise ParameterError(f"{path} cannot be written ({error.strerror or error}).") from None
        stream.truncate(self._size)
        stream.seek(self._size)
        return stream

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write and flush lines that start with "index"; sync at most once a second."""
        texts = [json.dumps(line, ensure_ascii=False).translate(_ESCAPED) + "\n" for line in lines]
        self._stream.write("".join(texts).encode())
        self._stream.flush()
        if self._path is not None and time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._stream.fileno())
            self._synced = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._path is not None:
            try:
                os.fsync(self._stream.fileno())
            finally:
                self._stream.close()

"""Write and read the answers of `topw generate --prompts-jsonl`: JSON lines in the order of the prompts.

Lines are only appended, so a crash damages only the last line. Each line has the index of its prompt, digests of the
request and of the model, and the seed of the run, so that a run can be resumed.
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
# Some readers, such as str.splitlines, take these characters for line breaks. json escapes the other line breaks.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
_SEEDS = 1 << 64  # number of seeds (docs/contract/random.md)
_SYNC_SECONDS = 1.0  # minimum time between disk syncs


@dataclass(frozen=True, slots=True)
class Finished:
    """What an interrupted run finished.

    prompts: number of finished prompts.
    failed: number of finished prompts that have an error instead of answers.
    size: bytes of the lines of finished prompts.
    run_seed: seed of the run; None if no prompt is finished.
    """

    prompts: int = 0
    failed: int = 0
    size: int = 0
    run_seed: int | None = None


def check_answers(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ParameterError if answers must not be written to `path`."""
    if path.is_dir():
        raise ParameterError(f"{path} is a folder; choose another name.")
    if not path.parent.is_dir():
        raise ParameterError(f"{path} cannot be written, because {path.parent} is not a folder; choose another name.")
    if path.exists() and not path.is_file():
        raise ParameterError(f"{path} is not a regular file; omit --output to write to standard output.")
    if path.exists() and not (resume or overwrite):
        raise ParameterError(f"{path} exists; continue it with --resume, or replace it with --overwrite.")


def read_finished(path: Path, requests: Sequence[str], samples: Sequence[int], model: str) -> Finished:
    """Read what an interrupted run finished. Incomplete lines and prompts are ignored.

    requests: digest of each prompt's request.
    samples: number of sequences of each request.
    model: digest of the model.

    Raises ParameterError if the file comes from other input, parameters or another model, or has another format.
    """
    if not path.exists():
        return Finished()
    finished, size, sequences = Finished(), 0, 0  # `sequences`: those of the prompt that is being read
    *lines, unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        answer = _parse_line(line)
        _check_line(answer, f"line {number} of {path}", finished.prompts, requests, model, finished.run_seed)
        size += len(line) + 1
        sequences += 1
        failed = "error" in answer
        if failed or sequences == samples[finished.prompts]:
            finished = Finished(finished.prompts + 1, finished.failed + failed, size, answer["run_seed"])
            sequences = 0
    if not unfinished.startswith(_START[: len(unfinished)]):
        raise ParameterError(f"the end of {path} was not written by this command; choose another --output.")
    return finished


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _check_line(answer: Any, place: str, index: int, requests: Sequence[str], model: str, run_seed: int | None) -> None:
    """Raises ParameterError unless `answer` is a line for the prompt `index` of this run.

    place: of the line, for error messages.
    run_seed: seed of the lines before; None without lines.
    """
    advice = "give the same input and options as before, or start again with --overwrite"
    if not isinstance(answer, dict) or not {"index", "request", "model", "run_seed"} <= answer.keys():
        raise ParameterError(f"{place} was not written by this command; choose another --output.")
    if answer["model"] != model:
        raise ParameterError(f"{place} was made with another model; {advice}.")
    if index >= len(requests):
        raise ParameterError(f"{place} answers a prompt that the input lacks, which has {len(requests)}; {advice}.")
    if answer["index"] != index or answer["request"] != requests[index]:
        raise ParameterError(f"{place} answers another prompt, or one with other parameters; {advice}.")
    seed = answer["run_seed"]
    if type(seed) is not int or not 0 <= seed < _SEEDS:
        raise ParameterError(f"{place} has the run_seed {seed!r:.60}, not an integer in [0, 2**64); {advice}.")
    if run_seed not in (None, seed):
        raise ParameterError(f"{place} has another run_seed than the lines before it; {advice}.")


class AnswerFile:
    """A context that appends answers to a file.

    path: the file; None for stdout.
    size: number of bytes of the file that are kept; answers follow them.
    """

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
        """Write and flush lines, whose first field must be "index". Syncs the disk at most once a second."""
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

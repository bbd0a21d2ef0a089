"""JSON lines of finished stages, beside the export's files.

The file is append-only, so a crash damages only its last line. Stages are found by a stamp of their inputs. The
journal ends at a line that cannot be read, and a stage whose file cannot be used starts over: neither is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.errors import SourceError
from topw_deploy.export.source.arrays import mapped_array
from topw_deploy.files import is_file_name, read_bounded, replacing
from topw_deploy.manifest import sha256_of
from topw_deploy.manifest.fields import decoded

_FILE = "journal.jsonl"
_MOST_BYTES = 256 << 20  # a line of a weight has about 150


def stamp_of(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Journal:
    """The journal in `folder`; without one, nothing is stored.

    say: called with one line for each kept or restarted stage.
    """

    def __init__(self, folder: Path | None, say: Callable[[str], object] = lambda _line: None) -> None:
        self._folder = folder
        self.say = say
        self._stages: dict[str, dict[str, Any]] = {}
        self._files: dict[str, dict[str, Any]] = {}
        if folder is not None:
            self._read(folder / _FILE)

    def find(self, stage: str, stamp: str, **fields: type) -> dict[str, Any] | None:
        """The note of `stage` under `stamp`, with its `file` as a path; None if it is missing or changed.

        fields: what the note must have, by type.
        """
        found = self._stages.get(stage)
        if found is None or self._folder is None:
            return None
        note = found["note"]
        if found["stamp"] != stamp:
            self.say(f"Starting over: {stage} (its source, options or libraries have changed)")
            return None
        if not all(isinstance(note.get(name), kind) for name, kind in fields.items()):
            self.say(f"Starting over: {stage} (its line in the journal is damaged)")
            return None
        if "file" in note:
            path = self._folder / note["file"]
            if not (path.is_file() and not path.is_symlink() and sha256_of(path) == note["sha256"]):
                self.say(f"Starting over: {stage} (the kept file is damaged)")
                return None
            note = {**note, "file": path}
        self.say(f"Kept from the interrupted export: {stage}")
        return dict(note)

    def last_note(self, stage: str) -> dict[str, Any]:
        """The last note of `stage`, under any stamp."""
        return dict(self._stages[stage]["note"]) if stage in self._stages else {}

    def done(self, stage: str, stamp: str, **note: Any) -> None:
        self.append({"stage": stage, "stamp": stamp, "note": note})

    def keep_file(self, stage: str, stamp: str, name: str, write: Callable[[Path], object], **note: Any) -> None:
        """Record `stage` and the file that `write` creates."""
        if self._folder is not None:
            write(self._folder / name)
            self.done(stage, stamp, **note, file=name, sha256=sha256_of(self._folder / name))

    def array(self, stage: str, stamp: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The array that `make` returns, computed once."""
        found = self.find(stage, stamp, file=str)
        if found is not None:
            with contextlib.suppress(SourceError):
                return np.array(mapped_array(found["file"], "the kept array"))
            self.say(f"Starting over: {stage} (the kept file is no array)")
        made = make()
        name = f"{stage.replace(' ', '-')}.npy"
        self.keep_file(stage, stamp, name, lambda path: np.save(path, made, allow_pickle=False))
        return made

    def data_file(self, name: str) -> dict[str, Any] | None:
        """The layout and the written weights (name, SHA-256) of a data file."""
        return self._files.get(name)

    def append(self, line: dict[str, Any]) -> None:
        """Append a line for a stage, the start of a data file, or a weight."""
        if self._folder is None:
            return
        self._apply(line)
        with (self._folder / _FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _read(self, path: Path) -> None:
        """Apply the lines up to the first damaged one, and remove the rest of the file.

        Otherwise lines that are appended after a damaged line would be lost to the next attempt.
        """
        try:
            lines = read_bounded(path, _MOST_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return
        except OSError:  # a link, a pipe, or too large
            lines = [b""]
        for number, line in enumerate(lines):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the process was killed while it wrote this line")
                self._apply(decoded(line.decode("utf-8")))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                with replacing(path) as stream:
                    stream.writelines(lines[:number])
                return

    def _apply(self, line: dict[str, Any]) -> None:
        """Raises ValueError, KeyError, TypeError or AttributeError for a line of another form."""
        if "stage" in line:
            note = dict(line["note"])
            if "file" in note:
                _require_name(note["file"])
                _require_text(note["sha256"])
            for name, digest in dict(note.get("made", {})).items():
                _require_name(name)
                _require_text(digest)
            self._stages[_require_text(line["stage"])] = {"stamp": line["stamp"], "note": note}
        elif "began" in line:
            self._files[_require_text(line["began"])] = {"layout": line["layout"], "weights": []}
        else:
            self._files[line["wrote"]]["weights"].append((line["name"], line["sha256"]))


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a text")
    return value


def _require_name(value: object) -> None:
    """Raises ValueError unless `value` names a file in the same folder."""
    if not is_file_name(value):
        raise ValueError(f"{value!r:.60} is not a file's name")


class DataLog:
    """The journal's data files (a data_files.Log).

    stamp: stamp of the weights' inputs.
    hashes: SHA-256 of each finished file.
    """

    def __init__(self, journal: Journal, stamp: str) -> None:
        self._journal, self._stamp = journal, stamp
        self.hashes: dict[str, str] = {}

    def written(self, file: str, layout: str) -> list[tuple[str, str]]:
        noted = self._journal.data_file(file)
        if noted is None:
            return []
        if noted["layout"] != stamp_of(self._stamp, layout):
            self._journal.say(f"Starting over: {file} (its source, options or libraries have changed)")
            return []
        return [(str(name), str(digest)) for name, digest in noted["weights"]]

    def began(self, file: str, layout: str, kept: list[tuple[str, str]]) -> None:
        if kept:
            self._journal.say(f"Kept from the interrupted export: {len(kept)} weights of {file}")
        self._journal.append({"began": file, "layout": stamp_of(self._stamp, layout)})
        for name, digest in kept:
            self.wrote(file, name, digest)

    def wrote(self, file: str, name: str, digest: str) -> None:
        self._journal.append({"wrote": file, "name": name, "sha256": digest})

    def finished(self, file: str, digest: str) -> None:
        self.hashes[file] = digest

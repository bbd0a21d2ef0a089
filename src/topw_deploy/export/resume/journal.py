"""A journal of finished stages, as JSON lines beside the export's files.

The file is append-only, so a crash can damage only its last line. A stage is found by the stamp of its inputs. Damage
is
no error: lines from the first damaged one on are removed, and a stage whose file cannot be used starts over.
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
from topw_deploy.export.source.arrays import map_array
from topw_deploy.files import is_file_name, read_bounded, replace_file
from topw_deploy.manifest import sha256_of

_FILE = "journal.jsonl"
_MOST_BYTES = 256 << 20  # the line of a weight has about 150


def stamp_of(*parts: object) -> str:
    """Return the SHA-256 of `parts` as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class Journal:
    """The journal in `folder`. Without a folder, it stores and finds nothing.

    say: called with a line for each stage that is kept or starts over.
    """

    def __init__(self, folder: Path | None, say: Callable[[str], object] = lambda _line: None) -> None:
        self._folder = folder
        self.say = say
        self._stages: dict[str, dict[str, Any]] = {}
        self._files: dict[str, dict[str, Any]] = {}
        if folder is not None:
            self._read_lines(folder / _FILE)

    def find(self, stage: str, stamp: str, **fields: type) -> dict[str, Any] | None:
        """Return the note of `stage`, with its `file` as a path; None if it cannot be used.

        A note can be used if it has this stamp and these fields, and if its file is unchanged.
        fields: the type of each field that the note must have.
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
        """Return the last note of `stage` under any stamp; {} without one."""
        return dict(self._stages[stage]["note"]) if stage in self._stages else {}

    def record(self, stage: str, stamp: str, **note: Any) -> None:
        """Record that `stage` is finished. note: its results, as JSON values."""
        self.append_line({"stage": stage, "stamp": stamp, "note": note})

    def record_file(self, stage: str, stamp: str, name: str, write: Callable[[Path], object], **note: Any) -> None:
        """Record that `stage` is finished, with the file `name` that `write` creates."""
        if self._folder is not None:
            write(self._folder / name)
            self.record(stage, stamp, **note, file=name, sha256=sha256_of(self._folder / name))

    def array_once(self, stage: str, stamp: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array of `make`, from the journal's file if an earlier attempt computed it."""
        found = self.find(stage, stamp, file=str)
        if found is not None:
            with contextlib.suppress(SourceError):
                return np.array(map_array(found["file"], "the kept array"))
            self.say(f"Starting over: {stage} (the kept file is no array)")
        made = make()
        name = f"{stage.replace(' ', '-')}.npy"
        self.record_file(stage, stamp, name, lambda path: np.save(path, made, allow_pickle=False))
        return made

    def data_file(self, name: str) -> dict[str, Any] | None:
        """Return the recorded layout and weights (name, SHA-256) of the data file `name`; None without a record."""
        return self._files.get(name)

    def append_line(self, line: dict[str, Any]) -> None:
        """Append a line for a stage, the start of a data file, or a weight."""
        if self._folder is None:
            return
        self._apply_line(line)
        with (self._folder / _FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _read_lines(self, path: Path) -> None:
        """Apply the lines up to the first damaged one, and remove that line and the rest of the file.

        The next attempt could not read lines that are appended after a damaged one.
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
                self._apply_line(json.loads(line.decode("utf-8")))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                with replace_file(path) as stream:
                    stream.writelines(lines[:number])
                return

    def _apply_line(self, line: dict[str, Any]) -> None:
        """Add a line to the stages and weights in memory.

        Raises ValueError, KeyError, TypeError or AttributeError for a line of another form.
        """
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
    """The weights in data files, as the journal records them. Implements data_files.Log.

    stamp: the stamp of the weights' inputs.
    hashes: file name -> SHA-256, for each complete file.
    """

    def __init__(self, journal: Journal, stamp: str) -> None:
        self._journal, self._stamp = journal, stamp
        self.hashes: dict[str, str] = {}

    def written_weights(self, file: str, layout: str) -> list[tuple[str, str]]:
        noted = self._journal.data_file(file)
        if noted is None:
            return []
        if noted["layout"] != stamp_of(self._stamp, layout):
            self._journal.say(f"Starting over: {file} (its source, options or libraries have changed)")
            return []
        return [(str(name), str(digest)) for name, digest in noted["weights"]]

    def record_start(self, file: str, layout: str, kept: list[tuple[str, str]]) -> None:
        if kept:
            self._journal.say(f"Kept from the interrupted export: {len(kept)} weights of {file}")
        self._journal.append_line({"began": file, "layout": stamp_of(self._stamp, layout)})
        for name, digest in kept:
            self.record_weight(file, name, digest)

    def record_weight(self, file: str, name: str, digest: str) -> None:
        self._journal.append_line({"wrote": file, "name": name, "sha256": digest})

    def record_end(self, file: str, digest: str) -> None:
        self.hashes[file] = digest

"""What an export has finished so far, kept beside what it writes, so that an interrupted one can go on.

A journal is a file of JSON lines, only ever added to: whatever moment the process dies at, the lines before that moment
are whole. Each stage is noted under a stamp of all it was made from (stamp.py); under another stamp it is not found.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from topw_deploy.export.progress import Progress
from topw_deploy.export.resume.stamp import stamp_of
from topw_deploy.manifest import sha256_of

_FILE = "journal.jsonl"


class Journal:
    """The journal of one hidden folder. `say` hears which stages are gone on with and which start over, and why."""

    def __init__(self, workshop: Path, say: Progress = lambda _line: None) -> None:
        self.workshop = workshop
        self._say = say
        self._stages: dict[str, dict[str, Any]] = {}
        self._files: dict[str, dict[str, Any]] = {}
        self._path = workshop / _FILE
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    self._apply(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    break  # the line that was being written

    def find(self, stage: str, stamp: str) -> dict[str, Any] | None:
        """What `done` noted of this stage under this stamp, or None; a file it noted must be as it was."""
        noted = self._stages.get(stage)
        if noted is None:
            return None
        file = noted["note"].get("file")
        if noted["stamp"] != stamp:
            self._say(f"Starting over: {stage} (its source, options or libraries have changed)")
        elif file is not None and not self._is_whole(file, noted["note"]["sha256"]):
            self._say(f"Starting over: {stage} (what was kept of it is damaged)")
        else:
            self._say(f"Kept from the interrupted export: {stage}")
            return dict(noted["note"])
        return None

    def noted(self, stage: str) -> dict[str, Any]:
        """What `done` noted of this stage last, whatever the stamp; empty if nothing."""
        return dict(self._stages[stage]["note"]) if stage in self._stages else {}

    def done(self, stage: str, stamp: str, file: str | None = None, **note: Any) -> None:
        """Note that `stage` is finished. file: its result, in the workshop."""
        if file is not None:
            note |= {"file": file, "sha256": sha256_of(self.workshop / file)}
        self._write({"stage": stage, "stamp": stamp, "note": note})

    def array(self, stage: str, stamp: str) -> np.ndarray | None:
        """The array that `keep_array` kept, or None."""
        found = self.find(stage, stamp)
        return None if found is None else np.load(self.workshop / found["file"], allow_pickle=False)

    def keep_array(self, stage: str, stamp: str, array: np.ndarray) -> None:
        """Keep the result of `stage`."""
        name = f"{stage.replace(' ', '-')}.npy"
        np.save(self.workshop / name, array, allow_pickle=False)
        self.done(stage, stamp, name)

    def _is_whole(self, file: str, digest: str) -> bool:
        path = self.workshop / file
        return path.is_file() and sha256_of(path) == digest

    def _write(self, line: dict[str, Any]) -> None:
        self._apply(line)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _apply(self, line: dict[str, Any]) -> None:
        if "stage" in line:
            self._stages[line["stage"]] = {"stamp": line["stamp"], "note": dict(line["note"])}
        elif "began" in line:
            self._files[line["began"]] = {"layout": line["layout"], "weights": []}
        else:
            self._files[line["wrote"]]["weights"].append((line["name"], line["sha256"]))


class DataLog:
    """The journal as write_data uses it (data_files.Log), under the stamp of all that decides the weights' values.

    `hashes`: SHA-256 of each finished file, which need not be read for it again.
    """

    def __init__(self, journal: Journal, stamp: str) -> None:
        self._journal, self._stamp = journal, stamp
        self.hashes: dict[str, str] = {}

    def written(self, file: str, layout: str) -> list[tuple[str, str]]:
        noted = self._journal._files.get(file)
        if noted is None:
            return []
        if noted["layout"] != stamp_of(self._stamp, layout):
            self._journal._say(f"Starting over: {file} (its source, options or libraries have changed)")
            return []
        return [(str(name), str(digest)) for name, digest in noted["weights"]]

    def began(self, file: str, layout: str, kept: list[tuple[str, str]]) -> None:
        if kept:
            self._journal._say(f"Kept from the interrupted export: {len(kept)} weights of {file}")
        self._journal._write({"began": file, "layout": stamp_of(self._stamp, layout)})
        for name, digest in kept:
            self.wrote(file, name, digest)

    def wrote(self, file: str, name: str, digest: str) -> None:
        self._journal._write({"wrote": file, "name": name, "sha256": digest})

    def finished(self, file: str, digest: str) -> None:
        self.hashes[file] = digest

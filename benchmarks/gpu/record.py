"""Results as JSON and Markdown files, replaced after every step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import PARTS, REHEARSAL

JSON, TABLES = "results.json", "results.md"
_FORMAT = 1

DONE, FAILED, PARTIAL, ABSENT, WAITING = "done", "failed", "partial", "absent", "waiting"
"""States of a step. absent: it cannot run here. waiting: not started, as too little of the budget was left."""

_WORDS = {
    DONE: "done",
    FAILED: "**FAILED**",
    PARTIAL: "partly done, continues in the next run",
    ABSENT: "**not run**",
    WAITING: "not started: too little of the budget was left",
}


class RecordError(Exception):
    """The folder holds results of another kind or format."""


class Record:
    """The results in a folder. Raises RecordError for results of another kind or format."""

    def __init__(self, folder: Path, rehearse: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._all: dict[str, Any] = {
            "format": _FORMAT, "rehearsal": REHEARSAL if rehearse else False, "machine": {}, "steps": {},
        }  # fmt: skip
        if (folder / JSON).is_file():
            self._all = _read(folder / JSON)
            if bool(self._all["rehearsal"]) != rehearse:
                kind = "a rehearsal's" if self._all["rehearsal"] else "a GPU's"
                raise RecordError(f"{folder} holds {kind} results; give another folder with --out.")

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """Entries by `part/step`."""
        found: dict[str, dict[str, Any]] = self._all["steps"]
        return found

    @property
    def rehearsal(self) -> bool:
        return bool(self._all["rehearsal"])

    def describe_machine(self, machine: dict[str, Any]) -> None:
        self._all["machine"] = machine
        self.write()

    def put(self, key: str, entry: dict[str, Any]) -> None:
        self.steps[key] = entry
        self.write()

    def drop(self, key: str) -> None:
        del self.steps[key]
        self.write()

    def write(self) -> None:
        replace_file(self.folder / JSON, json.dumps(self._all, indent=1, ensure_ascii=False) + "\n")
        replace_file(self.folder / TABLES, self.tables())

    def tables(self) -> str:
        """Markdown: failures, absences, then a section per part."""
        lines = ["# On a GPU", ""]
        if self._all["rehearsal"]:
            lines += [f"**{REHEARSAL}**", ""]
        lines += [f"{name}: {value}  " for name, value in self._all["machine"].items() if value]
        lines += ["", *_bullet_list("Failed", self.failures()), *_bullet_list("Not run here", self.absences())]
        for part in PARTS:
            mine = {key: entry for key, entry in self.steps.items() if key.split("/")[0] == part}
            if mine:
                lines += [f"## {part}" + (" (REHEARSAL)" if self._all["rehearsal"] else ""), ""]
            for key, entry in mine.items():
                lines += _section(key.split("/", 1)[1], entry)
        return "\n".join(lines).rstrip() + "\n"

    def failures(self) -> list[str]:
        return [f"{key}: {entry['failed']}" for key, entry in self.steps.items() if entry.get("failed")]

    def absences(self) -> list[str]:
        """What did not run: each reason once, with its steps."""
        sentences: dict[str, list[str]] = {}
        for key, entry in self.steps.items():
            for sentence in entry.get("absent", ()):
                sentences.setdefault(sentence, []).append(key)
        return [f"{', '.join(keys)}: {sentence}" for sentence, keys in sentences.items()]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is not JSON ({error}); move it away, or give another folder with --out.") from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise RecordError(f"{path} is from another version of this command; give another folder with --out.")
    return found


def _bullet_list(title: str, lines: list[str]) -> list[str]:
    return [f"**{title}:**", "", *(f"- {line}" for line in lines), ""] if lines else []


def _section(name: str, entry: dict[str, Any]) -> list[str]:
    took = f", {entry['seconds']:.0f} s" if entry.get("seconds") else ""
    changed = ", **measured before the kernels, torch or the GPU changed**" if entry.get("stale") else ""
    lines = [f"### {name}", "", f"{_WORDS[entry['state']]}{took}{changed}", ""]
    lines += [f"- FAILED: {entry['failed']}"] if entry.get("failed") else []
    lines += [f"- not run: {sentence}" for sentence in entry.get("absent", ())]
    lines += [""] if lines[-1] else []
    return [*lines, entry["table"], ""] if entry.get("table") else lines


def replace_file(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)

"""Results as JSON and Markdown files, replaced after every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.job import PARTS, REHEARSAL
from topw_deploy.errors import BenchmarkError
from topw_deploy.folders import atomic_file

JSON, TABLES = "results.json", "results.md"
_FORMAT = 2

DONE, FAILED, PARTIAL, ABSENT, WAITING = "done", "failed", "partial", "absent", "waiting"
"""States of a step. absent: it cannot run here. waiting: not started, as too little of the budget was left."""

_WORDS = {
    DONE: "done",
    FAILED: "**FAILED**",
    PARTIAL: "partly done, continues in the next run",
    ABSENT: "**not run**",
    WAITING: "not started: too little of the budget was left",
}


class Record:
    """The results in a folder. Raises BenchmarkError for results of another kind or format.

    steps: entries by `part/step`.
    """

    def __init__(self, folder: Path, rehearse: bool) -> None:
        self.folder, self.rehearsal = folder, rehearse
        self.machine: dict[str, Any] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON
        if not path.is_file():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            kind = found["format"], bool(found["rehearsal"])
        except (ValueError, KeyError, TypeError):
            kind = None
        if kind != (_FORMAT, rehearse):
            wanted = "a rehearsal's" if rehearse else "a GPU's"
            raise BenchmarkError(f"{path} does not hold {wanted} results of this version; give another --out.")
        self.steps = found["steps"]

    def put(self, key: str, entry: dict[str, Any]) -> None:
        self.steps[key] = entry
        self.write()

    def write(self) -> None:
        found = {
            "format": _FORMAT, "rehearsal": REHEARSAL if self.rehearsal else False, "machine": self.machine,
            "steps": self.steps,
        }  # fmt: skip
        for name, text in ((JSON, json.dumps(found, indent=1, ensure_ascii=False) + "\n"), (TABLES, self.tables())):
            with atomic_file(self.folder / name) as stream:
                stream.write(text.encode())

    def tables(self) -> str:
        """Markdown: failures, absences, then a section per part."""
        lines = ["# On a GPU", "", *([f"**{REHEARSAL}**", ""] if self.rehearsal else [])]
        lines += [f"{name}: {value}  " for name, value in self.machine.items() if value]
        failures = [f"{key}: {entry['failed']}" for key, entry in self.steps.items() if entry.get("failed")]
        absences: dict[str, list[str]] = {}  # each reason once, with its steps
        for key, entry in self.steps.items():
            for sentence in entry.get("absent", ()):
                absences.setdefault(sentence, []).append(key)
        missing = [f"{', '.join(keys)}: {sentence}" for sentence, keys in absences.items()]
        for title, found in (("Failed", failures), ("Not run here", missing)):
            lines += ["", f"**{title}:**", "", *(f"- {line}" for line in found)] if found else []
        for part in PARTS:
            mine = {key: entry for key, entry in self.steps.items() if key.split("/")[0] == part}
            if mine:
                lines += ["", f"## {part}" + (" (REHEARSAL)" if self.rehearsal else "")]
            for key, entry in mine.items():
                took = f", {entry['seconds']:.0f} s" if entry.get("seconds") else ""
                lines += ["", f"### {key.split('/', 1)[1]}", "", f"{_WORDS[entry['state']]}{took}"]
                lines += ["", entry["table"]] if entry.get("table") else []
        return "\n".join(lines) + "\n"

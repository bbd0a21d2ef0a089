"""Results of exports, kept in a JSON file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

FORMS = {"default": {}, "tensorrt": {"target": "tensorrt"}, "int4": {"dtype": "int4"}}
"""Form -> options of export_model."""

RESULTS = Path(__file__).with_name("results.json")
"""The results behind docs/models.md."""

EXPORTED, REFUSED, WRONG, FAILED, BROKEN = "exported", "refused", "wrong", "failed", "broken"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One architecture in one form.

    outcome: EXPORTED (and verified), REFUSED by the exporter, WRONG (verification failed), FAILED (any other error, a
    timeout, or too little memory), or BROKEN (the architecture's own code fails in torch).
    states: kind of state -> number of layers that have one; empty without an export.
    context: the export's context length; that of most tiny models is CONTEXT, of a few less.
    difference: largest difference to torch's logits.
    reason: why there is no export.
    """

    model_type: str
    form: str
    outcome: str
    seconds: float = 0.0
    status: str = ""
    states: dict[str, int] = field(default_factory=dict)
    context: int = 0
    difference: float | None = None
    reason: str = ""


class ResultFile:
    """Results by model type and form; written after each one, so that an interrupted run continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        records = json.loads(path.read_text("utf-8"))["results"] if path.exists() else []
        self._results = {(each["model_type"], each["form"]): Result(**each) for each in records}

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results[key] for key in sorted(self._results))

    def find(self, model_type: str, form: str) -> Result | None:
        return self._results.get((model_type, form))

    def add(self, result: Result) -> None:
        """Add a result and replace the file atomically."""
        with self._lock:
            self._results[result.model_type, result.form] = result
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps({"results": [asdict(each) for each in self]}, indent=1) + "\n", "utf-8")
            os.replace(new, self._path)

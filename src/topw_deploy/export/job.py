"""The export in progress, which all its stages share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from topw_deploy.export.request import ExportRequest
from topw_deploy.export.resume.finished_stages import FinishedStages
from topw_deploy.export.source.resolve import Source
from topw_deploy.progress import SILENT, Progress, StageMemory


@dataclass(frozen=True)
class Job:
    """One export in progress.

    request: what the user asked for.
    source: the folder or file with the model.
    finished: what an interrupted export of the same request has finished.
    progress: receives messages for the user.
    memory: peak resident memory of each stage, in bytes.
    started: when the export began, by time.monotonic().
    """

    request: ExportRequest
    source: Source
    finished: FinishedStages
    progress: Progress = SILENT
    memory: StageMemory = field(default_factory=StageMemory)
    started: float = field(default_factory=time.monotonic)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer and the configuration."""
        return self.request.tokenizer or self.source.folder

"""State shared by export stages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from topw_deploy.export.request import ExportRequest
from topw_deploy.export.resume.finished import FinishedStages
from topw_deploy.export.source.resolve import Source
from topw_deploy.memory import StageMemory
from topw_deploy.progress import SILENT, Progress


@dataclass(frozen=True)
class Job:
    """One export in progress.

    finished: stages completed before an interruption.
    memory: peak resident memory of each stage.
    started: time.monotonic().
    """

    request: ExportRequest
    source: Source
    finished: FinishedStages
    progress: Progress = SILENT
    memory: StageMemory = field(default_factory=StageMemory)
    started: float = field(default_factory=time.monotonic)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with tokenizer and configuration."""
        return self.request.tokenizer or self.source.folder

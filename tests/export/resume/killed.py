"""An export that kills its own process."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from topw_deploy.export import export_model
from topw_deploy.export.request import export_request
from topw_deploy.export.write import data_files, weights
from topw_deploy.progress import Progress


def export_and_die(model: str, out: str, stop: str, traces: Path | None) -> None:
    """Export `model` to `out`; die at the line starting with `stop`, or before weight `stop`."""
    weights.EXTERNAL_ABOVE = 10_000
    write, left = data_files._write_weight, int(stop) if stop.isdigit() else None

    def count_weights(*arguments: Any) -> Any:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                _die()
        return write(*arguments)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if line.startswith(stop):
            _die()

    data_files._write_weight = count_weights  # type: ignore[assignment]
    _share_traces(traces)
    export_model(export_request(model=model, output=Path(out), resume=True, neighbour_bound=True), Progress(say))


def _share_traces(folder: Path | None) -> None:
    from tests.support import traces
    from topw_deploy.export import traced_decoder as decoder

    traces.folder = folder
    decoder.trace = traces.trace


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

"""onnxruntime's telemetry: on Linux too its official builds (1.31 does) report trace events to their maker by HTTPS."""

from __future__ import annotations

import os


def switch_off() -> None:
    """Have onnxruntime send nothing, and leave no file of its own (`.ses`) in TMPDIR, unless ORT_DISABLE_TELEMETRY says
    otherwise. It reads that variable when it is imported: nothing changes where it was imported before."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

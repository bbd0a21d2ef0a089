"""Disable onnxruntime's telemetry: official builds, also on Linux (1.31), send trace events to Microsoft."""

from __future__ import annotations

import os


def switch_off() -> None:
    """Disable it and its `.ses` file in TMPDIR, unless ORT_DISABLE_TELEMETRY is set.

    onnxruntime reads the variable on import, so call this first.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

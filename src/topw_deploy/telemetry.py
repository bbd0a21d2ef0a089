"""onnxruntime's telemetry: its official builds, on Linux too (1.31), send trace events to Microsoft."""

from __future__ import annotations

import os


def switch_off() -> None:
    """Disable it, and its `.ses` file in TMPDIR, unless ORT_DISABLE_TELEMETRY is set.

    Has no effect once onnxruntime is imported, as it reads the variable then.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

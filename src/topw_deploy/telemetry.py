"""Switch off onnxruntime's telemetry: official builds send events to Microsoft, on Linux too (1.31)."""

from __future__ import annotations

import os


def switch_off() -> None:
    """Disable telemetry and its `.ses` file in TMPDIR, unless ORT_DISABLE_TELEMETRY is set.

    Call before the import of onnxruntime, which reads the variable.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

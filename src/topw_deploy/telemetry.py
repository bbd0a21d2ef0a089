"""Switch off onnxruntime's telemetry: official builds send events to Microsoft, from 1.31 on also on Linux."""

from __future__ import annotations

import os


def switch_off() -> None:
    """Disable telemetry, and its `.ses` file in TMPDIR, unless the user has set ORT_DISABLE_TELEMETRY.

    Call this before onnxruntime is imported, because the import reads that variable.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

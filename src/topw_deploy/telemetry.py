"""onnxruntime's telemetry: official builds, also on Linux (1.31), send events to Microsoft."""

from __future__ import annotations

import os


def switch_off() -> None:
    """Disable it and its `.ses` file in TMPDIR, unless ORT_DISABLE_TELEMETRY is set.

    Call before importing onnxruntime, which reads the variable then.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

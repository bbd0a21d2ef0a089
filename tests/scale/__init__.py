"""More than one machine: Ray Serve, Triton, containers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(condition: Callable[[], object], what: str, seconds: float = 240) -> None:
    """Wait until a condition holds. Raises SystemExit if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come within {seconds} s")
        time.sleep(0.1)

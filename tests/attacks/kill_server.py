"""A server killed while clients read streams, and the one that follows at the same port.

    python -m tests.attacks.kill_server FOLDER SCRATCH

Prints JSON: {"clients": count, "whole": answers that arrived whole, "cut": clients whose connection was closed, "left":
files that the server left, "wrong": complaints}.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CLIENTS, BEFORE = 8, 16  # BEFORE: whole answers until the server is killed
_STUCK = 60.0  # seconds


class Server:
    """`topw serve` in a process, with a home and a folder of temporary files of its own."""

    def __init__(self, folder: str, scratch: Path, port: int = 0) -> None:
        places = {name: str(scratch / name.lower()) for name in ("HOME", "TMPDIR")}
        for place in places.values():
            Path(place).mkdir(exist_ok=True)
        words = ["serve", folder, "--port", str(port), "--provider", "cpu", "--threads", "1", "--max-batch", "4"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "topw_deploy", *words],
            stdout=subprocess.DEVNULL,  # not our own, which would stay open if we fail before it ends
            stderr=subprocess.PIPE,
            text=True,
            cwd=scratch / "home",
            env={**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        atexit.register(self.process.kill)
        assert self.process.stderr is not None
        line = next(line for line in self.process.stderr if "http://" in line)
        self.port = int(line.partition("http://127.0.0.1:")[2].partition('"')[0])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self._until_ready()

    def _until_ready(self) -> None:
        until = time.monotonic() + _STUCK
        while time.monotonic() < until:
            try:
                if get(self.port, "/health") == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError("the server is not ready")


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_STUCK)
    connection.request("GET", path)
    return connection.getresponse().status


def stream(port: int, seed: int) -> tuple[str, bool]:
    """Returns (text, whether all of the answer arrived). Raises AssertionError for an event that is damaged."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "seed": seed, "temperature": 2.0,
            "ignore_eos": True}  # fmt: skip
    text, found = "", False
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_STUCK)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.status
        for line in response:
            if not line.endswith(b"\n"):
                break  # cut within a line
            if line.startswith(b"data: [DONE]"):
                found = True
            elif line.startswith(b"data: "):
                choices = json.loads(line[6:])["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
    except (ConnectionError, http.client.HTTPException):
        return text, False
    return text, found


def main(folder: str, scratch: Path) -> None:
    server, wrong = Server(folder, scratch), list[str]()
    answers: dict[int, str] = {}
    cut: dict[int, str] = {}
    enough = threading.Event()

    def client(number: int) -> None:
        seed = number
        try:
            while True:
                text, whole = stream(server.port, seed)
                if not whole:
                    cut[seed] = text
                    return
                answers[seed] = text
                seed += CLIENTS
                if len(answers) >= BEFORE:
                    enough.set()
        except Exception as error:  # noqa: BLE001  # whatever a client sees that is neither whole nor cut
            wrong.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    if not enough.wait(_STUCK):
        wrong.append("the server answers too few requests")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    for thread in threads:
        thread.join(_STUCK)
    if any(thread.is_alive() for thread in threads):
        wrong.append("a client waits for a server that is gone")
    left = sorted(str(path) for place in ("home", "tmpdir") for path in (scratch / place).rglob("*"))
    wrong += again(folder, scratch, server.port, answers, cut)
    report: dict[str, Any] = {"clients": CLIENTS, "whole": len(answers), "cut": len(cut), "left": left, "wrong": wrong}
    sys.stdout.write(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


def again(folder: str, scratch: Path, port: int, answers: dict[int, str], cut: dict[int, str]) -> list[str]:
    """A second server at the same port gives the same answers, of which the cut ones were the beginning."""
    wrong = []
    server = Server(folder, scratch, port)
    if server.port != port:
        wrong.append(f"the second server listens at {server.port}, not {port}")
    for seed, text in [*list(answers.items())[:4], *cut.items()]:
        found, whole = stream(port, seed)
        if not whole or not found.startswith(text.rstrip("\ufffd")) or (seed in answers and found != text):
            wrong.append(f"seed {seed}: {text!r:.60} before, {found!r:.60} after")
    server.process.send_signal(signal.SIGTERM)
    if server.process.wait(_STUCK):
        wrong.append(f"the second server ends with {server.process.returncode}")
    return wrong


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Servers killed at one moment after another, each followed by the next one at the same address.

    python -m tests.attacks.kill_server FOLDER SCRATCH ADDRESS MOMENT...

ADDRESS: a port, 0 for any, or the path of a Unix socket. MOMENT: a key of MOMENTS.

Prints JSON: {"clients": count, "moments": {moment: {"whole": answers that arrived whole, "cut": clients whose
connection was closed, "begun": those of them with some text, "refused": answers with 503, by code}}, "left": files that
the servers left, "wrong": complaints}.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from tests.support.waiting import HANG, until

CLIENTS, BEFORE = 8, 8  # BEFORE: whole answers until a server that streams is killed

MOMENTS = {"loading": "Served.open", "reading": "Batch.read", "streaming": "Batch.step", "draining": "Batch.step"}
"""A moment -> what the server does slowly, so that it is certainly killed meanwhile. `reading`: long prompts."""

SLOWLY = """
import sys, time
from topw_deploy.cli.main import main
from topw_deploy.engine.batch import Batch
from topw_deploy.serve.service import Served
seconds = {"Served.open": 600, "Batch.read": 0.2, "Batch.step": 0.01}[sys.argv[1]]
owner, name = sys.argv[1].split(".")
owner = {"Served": Served, "Batch": Batch}[owner]
real = getattr(owner, name)
def slowly(*arguments, **options):
    time.sleep(seconds)
    return real(*arguments, **options)
setattr(owner, name, slowly)
main(sys.argv[2:])
"""


class Server:
    """`topw serve` in a process, with a home and a folder of temporary files of its own."""

    def __init__(self, folder: str, scratch: Path, address: str, slow: str | None = None) -> None:
        places = {name: str(scratch / name.lower()) for name in ("HOME", "TMPDIR")}
        for place in places.values():
            Path(place).mkdir(exist_ok=True)
        program = ["-m", "topw_deploy"] if slow is None else ["-c", SLOWLY, slow]
        where = ["--port" if address.isdecimal() else "--uds", address]
        options = ["--provider", "cpu", "--threads", "1", "--max-batch", "4", "--prefill-budget", "8"]
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", folder, *where, *options],
            stdout=subprocess.DEVNULL,  # not our own, which would stay open if we fail before it ends
            stderr=subprocess.PIPE,
            text=True,
            cwd=scratch / "home",
            env={**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        atexit.register(self.process.kill)
        assert self.process.stderr is not None
        listening = next((line for line in self.process.stderr if '"listening"' in line), None)
        assert listening is not None, "the server does not listen"
        self.address = re.sub("^(unix:|http://127.0.0.1:)", "", json.loads(listening)["address"])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def wait(self, status: int) -> None:
        """Wait until /health has a status."""
        with client(self.address) as asking:
            until(lambda: asking.get("/health").status_code == status)

    def counts(self, name: str) -> float:
        """A metric of the model."""
        with client(self.address) as asking:
            text = asking.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^topw:{name}{{.*}} (.*)$", text, re.MULTILINE))


def client(address: str) -> httpx2.Client:
    """A client of a port or a Unix socket."""
    port = address if address.isdecimal() else "0"
    transport = None if address.isdecimal() else httpx2.HTTPTransport(uds=address)
    limits = httpx2.Limits(max_keepalive_connections=0)  # so that none is found closed
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=HANG, limits=limits)


class Load:
    """Clients that ask for streams, one after the other, until their connection is cut or the server drains.

    answers: whole texts by seed. cut: those that broke off. refused: error codes of answers with 503.
    begun: number of streams that had some text.
    """

    def __init__(self, address: str, moment: str) -> None:
        self.answers: dict[int, str] = {}
        self.cut: dict[int, str] = {}
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.begun = 0
        self._address, self._moment = address, moment
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def counts(self) -> dict[str, Any]:
        begun = sum(map(bool, self.cut.values()))
        return {"whole": len(self.answers), "cut": len(self.cut), "begun": begun, "refused": dict(self.refused)}

    def join(self) -> None:
        for thread in self._threads:
            thread.join(HANG)
        if any(thread.is_alive() for thread in self._threads):
            self.wrong.append("a client waits for a server that is gone")

    def _ask(self, seed: int) -> None:
        found = "whole"
        try:
            while found in ("whole", "loading"):
                text, found = self.stream(seed)
                if found == "whole":
                    self.answers[seed] = text
                elif found == "cut":
                    self.cut[seed] = text
                else:
                    self.refused[found] += 1
                    time.sleep(0.01)
                seed += CLIENTS
        except Exception as error:  # noqa: BLE001  # whatever a client sees that is neither whole, cut nor refused
            self.wrong.append(f"seed {seed}: {error!r}")

    def stream(self, seed: int) -> tuple[str, str]:
        """Ask for one stream. Returns (text, what became of the stream: "whole", "cut" or the error code of a 503)."""
        content = f"{seed:02} " * 27 if self._moment == "reading" else "Hi"  # the context has 96 tokens
        body = {"messages": [{"role": "user", "content": content}], "stream": True, "seed": seed, "temperature": 2.0,
                "ignore_eos": True}  # fmt: skip
        text = ""
        try:
            with (
                client(self._address) as asking,
                asking.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.status_code == 503:
                    return "", str(json.loads(response.read())["error"]["code"])
                assert response.status_code == 200, response.status_code
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return text, "whole"
                    if line.startswith("data: "):
                        choices = json.loads(line[6:])["choices"]
                        new = "".join(choice["delta"].get("content") or "" for choice in choices)
                        self.begun += bool(new and not text)
                        text += new
        except httpx2.TransportError:
            pass
        return text, "cut"


def kill(server: Server, moment: str) -> Load:
    """Kill a server at a moment, and return what its clients saw."""
    if moment != "loading":
        server.wait(200)
    load = Load(server.address, moment)
    if moment == "loading":
        until(lambda: load.refused["loading"] >= CLIENTS)
    elif moment == "reading":
        until(lambda: server.counts("engine_prompt_chunks_total") >= 2)
    elif moment == "streaming":
        until(lambda: BEFORE <= len(load.answers) < load.begun)
    else:
        until(lambda: load.begun >= 2)
        server.process.send_signal(signal.SIGTERM)
        server.wait(503)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    load.join()
    return load


def check_again(server: Server, load: Load) -> list[str]:
    """A server gives the answers of an earlier one, of which the cut ones were the beginning."""
    wrong = []
    for seed, text in [*list(load.answers.items())[:4], *list(load.cut.items())]:
        found, how = load.stream(seed)
        if how != "whole" or not found.startswith(text.rstrip("\ufffd")) or (seed in load.answers and found != text):
            wrong.append(f"seed {seed}: {text!r:.60} before, {found!r:.60} after")
    return wrong


def main(folder: str, scratch: Path, address: str, *moments: str) -> None:
    loads, wrong = dict[str, Load](), list[str]()
    for moment in moments:
        server = Server(folder, scratch, address, MOMENTS[moment])
        if address not in ("0", server.address):
            wrong.append(f"a server listens at {server.address}, not {address}")
        address = server.address
        loads[moment] = kill(server, moment)
        wrong += [f"{moment}: {each}" for each in loads[moment].wrong]
    left = sorted(str(path) for place in ("home", "tmpdir") for path in (scratch / place).rglob("*"))
    server = Server(folder, scratch, address)
    server.wait(200)
    for load in loads.values():
        wrong += check_again(server, load)
    server.process.send_signal(signal.SIGTERM)
    if server.process.wait(HANG):
        wrong.append(f"the last server ends with {server.process.returncode}")
    found = {moment: load.counts() for moment, load in loads.items()}
    sys.stdout.write(json.dumps({"clients": CLIENTS, "moments": found, "left": left, "wrong": wrong}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

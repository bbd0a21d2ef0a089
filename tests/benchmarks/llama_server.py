"""Takes the options of llama.cpp's server that the benchmark gives, and answers like it, without a model.

Loads for a moment, and leaves a file in $STARTS when it starts and when it is asked to end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
LOADING = 0.1  # seconds


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """Close the connection a moment after an answer without announcing it, as llama.cpp's server does at times."""
        self.handle_one_request()
        time.sleep(0.02)

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" and time.monotonic() > STARTED + LOADING else 503, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if self.path != "/v1/completions" or body["temperature"] != 0:
            self._answer(400, b"{}")
        elif body.get("stream"):
            last = body["max_tokens"] - 1
            texts = [{"text": "a", "finish_reason": None if n < last else "length"} for n in range(last + 1)]
            chunks: list[dict[str, Any]] = [{"choices": [text]} for text in texts]
            if body["stream_options"]["include_usage"]:
                chunks.append({"choices": [], "usage": usage})
            self._answer(200, b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks))
        else:
            text = {"text": "a" * body["max_tokens"], "finish_reason": "length"}
            self._answer(200, json.dumps({"choices": [text], "usage": usage}).encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def left(what: str) -> None:
    (Path(os.environ["STARTS"]) / f"{os.getpid()}.{what}").touch()


def end(*_: Any) -> None:
    left("ended")
    sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", choices=("127.0.0.1",), required=True)
    for name in ("port", "parallel", "ctx-size", "cache-ram", "threads", "threads-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--no-webui", action="store_true")
    args = parser.parse_args()
    args.model.read_bytes()
    signal.signal(signal.SIGTERM, end)
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    left("started")
    server.serve_forever()


if __name__ == "__main__":
    main()

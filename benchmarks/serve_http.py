"""Load on `topw serve` and other servers, with the same float32 weights.

    python -m benchmarks.serve_http --model llama-50m [--llama-server PROGRAM] [--llama-python PYTHON]
        [--transformers PROGRAM] [--streams 64] [--seconds 600] [--rounds 3] [--threads 2] [--json FILE]

Each side serves greedy completions to the same number of concurrent streams for `--seconds`, divided into rounds in
which the sides take turns in random order. A server is started for each turn. Prompts are random texts of
`--prompt-tokens` characters, the same for all sides.

--llama-server: llama.cpp's own server, a slot per stream. Its weights are a file that --llama-python writes once.
--llama-python: an interpreter with llama-cpp-python[server] and gguf; that server runs one sequence at a time.
--transformers: the program of an environment with transformers[serving] and accelerate; it runs with
    --continuous-batching.
Sides that are not named are left out. llama.cpp keeps keys and values in float16, as it does by default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.common import add_repository_to_pythonpath, interleave, machine, say, table
from benchmarks.int4 import write_float32_gguf
from benchmarks.models import CACHE, export_once, llama_50m
from topw_deploy.tiny import TINY_MODEL
from topw_lab.tables import significant
from topw_lab.worker import Worker

PATH = "/v1/completions"
START_SECONDS = 300.0  # until a server must answer
_GRACE = 30.0  # seconds for a server to end
_CONTEXT = 256  # context lengths are multiples of this
_PAUSE = 0.1  # seconds after a refused request
HEADER = ("server", "new tokens/s", "first text ms", "p99", "between texts ms", "p99", "requests", "errors")


@dataclass(frozen=True)
class ServerSide:
    """A server.

    command: starts it; a port follows.
    ready: path that answers 200 when it can be used.
    fields: what its requests have beside prompt and length.
    """

    name: str
    command: Sequence[str]
    ready: str
    fields: Mapping[str, Any]


def chosen_sides(args: argparse.Namespace) -> Iterator[ServerSide]:
    """Ours, and those that are named."""
    demo = args.model == "demo"
    model = TINY_MODEL if demo else llama_50m()
    length, threads = sequence_length(args), str(args.threads)
    usage = {"stream_options": {"include_usage": True}}
    folder = export_once("tiny" if demo else model, "--dtype", "fp32")
    words = [sys.executable, "-m", "topw_deploy", "serve", str(folder), "--served-model-name", "model"]
    sizes = ["--max-batch", str(args.streams), "--max-length", str(length), "--threads", threads, "--provider", "cpu"]
    yield ServerSide("topw serve", [*words, *sizes], "/health", {"model": "model", **usage})
    if args.llama_server is not None:
        words = [str(args.llama_server), "--model", str(gguf_file(model, args.llama_python)), "--host", "127.0.0.1"]
        # Keeping ended prompts is off: none comes again.
        sizes = ["--parallel", str(args.streams), "--ctx-size", str(args.streams * length), "--cache-ram", "0"]
        sizes += ["--threads", threads, "--threads-batch", threads, "--no-webui"]
        yield ServerSide("llama.cpp's server", [*words, *sizes], "/health", usage)
    if args.llama_python is not None:
        words = [str(args.llama_python), "-m", "llama_cpp.server", "--model", str(gguf_file(model, args.llama_python))]
        sizes = ["--n_ctx", str(length), "--n_threads", threads, "--n_threads_batch", threads]
        options = ["--interrupt_requests", "False", "--verbose", "False"]
        yield ServerSide("llama-cpp-python's server", [*words, *sizes, *options], "/v1/models", {})
    if args.transformers is not None:
        name = str(model.absolute())
        words = [str(args.transformers), "serve", name, "--device", "cpu", "--dtype", "float32"]
        # Otherwise its cache takes most of the machine's memory.
        sizes = ["--cb-block-size", str(_CONTEXT), "--cb-num-blocks", str(args.streams * length // _CONTEXT + 1)]
        sizes += ["--continuous-batching", "--cb-max-batch-tokens", str(max(args.streams, 512))]
        yield ServerSide("transformers serve", [*words, *sizes], "/health", {"model": name})


def sequence_length(args: argparse.Namespace) -> int:
    """Tokens that a sequence needs room for."""
    return -(-(args.prompt_tokens + args.new_tokens) // _CONTEXT) * _CONTEXT


def gguf_file(model: Path, python: Path | None) -> Path:
    """The weights and the vocabulary for llama.cpp, written by `python` at first. Exits without either."""
    file = (CACHE / "gguf" / f"{model.name}-F32-text.gguf").absolute()
    if not file.exists():
        if python is None:
            raise SystemExit(f"{file} is missing; give --llama-python, which writes it")
        file.parent.mkdir(parents=True, exist_ok=True)
        worker_file = Path(__file__).with_name("llama_cpp_worker.py")
        with Worker("llama.cpp", worker_file, {"threads": 1}, python=python) as worker:
            write_float32_gguf(worker, model, file, texts=True)
    return file


@contextmanager
def run_server(side: ServerSide, threads: int) -> Iterator[str]:
    """Start a server. Yields its address. Exits with its last lines if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    add_repository_to_pythonpath()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        command = [*side.command, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            if not _wait_until_ready(process, address + side.ready):
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").splitlines()[-20:]
                raise SystemExit("\n".join([f"{side.name} does not start:", *lines]))
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    until = time.monotonic() + START_SECONDS
    with httpx2.Client(timeout=10) as client:
        while process.poll() is None and time.monotonic() < until:
            try:
                if client.get(url).status_code == 200:
                    return True
            except httpx2.HTTPError:
                pass
            time.sleep(0.2)
    return False


@dataclass
class Answer:
    """One streamed completion.

    asked: time of the request.
    texts: times at which parts of the text arrived. A part is the text of one token or of several.
    error: the kind of error, in a few words; empty without one.
    reason: why the server ended the stream; empty while it runs.
    counted: the server's count of tokens, or None.
    """

    asked: float
    texts: list[float] = field(default_factory=list)
    error: str = ""
    reason: str = ""
    counted: int | None = None

    def feed(self, line: str) -> None:
        data = line.removeprefix("data:").strip()
        if data == line.strip() or data == "[DONE]":  # no event, or the last one
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = "an error in the stream"
        self.counted = (chunk.get("usage") or {}).get("completion_tokens", self.counted)
        for choice in chunk.get("choices") or ():
            self.texts += [time.perf_counter()] if choice.get("text") else []
            self.reason = choice.get("finish_reason") or self.reason

    def tokens(self, limit: int) -> int:
        """The server's count of tokens; without one, `limit` if the stream ended for its length, else the parts."""
        if self.counted is not None and self.reason:
            return self.counted
        return limit if self.reason == "length" else len(self.texts)


@dataclass
class Turn:
    """The figures of one server under load.

    seconds: length of the load.
    requests: number of requests that ended without an error.
    tokens: tokens of all requests, those that were still running at the end included.
    first: seconds from a request to its first text.
    gaps: seconds between successive texts.
    errors: kind of error -> number of requests.
    """

    seconds: float
    requests: int
    tokens: int
    first: list[float]
    gaps: list[float]
    errors: dict[str, int]


async def run_load(side: ServerSide, address: str, args: argparse.Namespace) -> Turn:
    """Keep `args.streams` requests running for a round, then drop those that still run."""
    answers: list[Answer] = []
    numbers = count()

    async def call_again(client: httpx2.AsyncClient) -> None:
        while True:
            request = {**body(side, next(numbers), args), "stream": True}
            answer = Answer(time.perf_counter())
            answers.append(answer)
            try:
                async with client.stream("POST", PATH, json=request) as response:
                    if response.status_code != 200:
                        answer.error = f"status {response.status_code}"
                    async for line in response.aiter_lines():
                        answer.feed(line)
                answer.error = answer.error or ("" if answer.reason else "the stream ended early")
            except httpx2.HTTPError as error:
                answer.error = type(error).__name__
            if answer.error:
                await asyncio.sleep(_PAUSE)

    # A connection for each request: llama.cpp's server at times closes one just when it is used again.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        began = time.perf_counter()
        callers = [asyncio.ensure_future(call_again(client)) for _ in range(args.streams)]
        seconds = args.seconds / args.rounds
        done, running = await asyncio.wait(callers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        took = time.perf_counter() - began
        for caller in running:
            caller.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for caller in done:
            caller.result()  # raises a fault of ours
    return Turn(
        seconds=took,
        requests=sum(bool(answer.reason) and not answer.error for answer in answers),
        tokens=sum(answer.tokens(args.new_tokens) for answer in answers),
        first=[answer.texts[0] - answer.asked for answer in answers if answer.texts],
        gaps=[gap for answer in answers for gap in np.diff(answer.texts).tolist()],
        errors=dict(Counter(answer.error for answer in answers if answer.error)),
    )


def body(side: ServerSide, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """The request of a number, which has the same text for every side."""
    letters = random.Random(f"{args.seed} {number}").choices(string.ascii_letters, k=args.prompt_tokens)
    return {"prompt": "".join(letters), "max_tokens": args.new_tokens, "temperature": 0, **side.fields}


def take_turn(side: ServerSide, args: argparse.Namespace) -> Turn:
    """Start the server, serve one request whole, which warms it up, and then the load."""
    say(side.name)
    with run_server(side, args.threads) as address:
        request = {name: value for name, value in body(side, -1, args).items() if name != "stream_options"}
        answer = httpx2.post(address + PATH, json=request, timeout=START_SECONDS)
        if answer.status_code != 200:
            raise SystemExit(f"{side.name} answers {answer.status_code}: {answer.text[:1000]}")
        return asyncio.run(run_load(side, address, args))


def table_row(name: str, turns: Sequence[Turn]) -> tuple[str, ...]:
    """Rates by turn, waits over all turns."""
    rates = [turn.tokens / turn.seconds for turn in turns]
    low, median, high = (significant(rate) for rate in (min(rates), statistics.median(rates), max(rates)))
    waits = []
    for values in ([v for turn in turns for v in turn.first], [v for turn in turns for v in turn.gaps]):
        found = np.percentile(values, (50, 99), method="inverted_cdf") if values else ()
        waits += [significant(value * 1e3) for value in found] or ["", ""]
    errors = sum((Counter(turn.errors) for turn in turns), Counter[str]())
    faults = ", ".join(f"{number} x {what}" for what, number in sorted(errors.items())) or "none"
    return name, f"{median} ({low}-{high})", *waits, str(sum(turn.requests for turn in turns)), faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-50m", choices=("demo", "llama-50m"))
    parser.add_argument("--llama-server", type=Path, help="the program `llama-server` of llama.cpp")
    parser.add_argument("--llama-python", type=Path, help="interpreter with llama-cpp-python[server] and gguf")
    parser.add_argument("--transformers", type=Path, help="the program `transformers` of an environment")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load, for each side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    sides = {side.name: partial(take_turn, side, args) for side in chosen_sides(args)}
    found = interleave(sides, args.rounds, warmup=0, seed=args.seed)
    rows = [table_row(name, turns) for name, turns in found.items()]
    title = f"{machine()}; {args.model}, {args.streams} streams, {args.threads} threads"
    print(f"\n{title}\n\n{table(HEADER, rows)}", flush=True)
    if args.json is not None:
        document = {"title": title, "sides": {name: [asdict(turn) for turn in turns] for name, turns in found.items()}}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

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
import math
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.common import add_repository_to_pythonpath, machine, say, table
from benchmarks.http_load import PATH, Turn, run_load
from benchmarks.int4 import write_float32_gguf
from benchmarks.models import CACHE, export_once, llama_50m
from topw_deploy.tiny import tiny_model_path
from topw_lab.tables import significant
from topw_lab.worker import Worker

HERE = Path(__file__)
START_SECONDS = 300.0  # until a server must answer
_GRACE = 30.0  # seconds for a server to end
_CONTEXT = 256  # context lengths are multiples of this


@dataclass(frozen=True)
class ServerSide:
    """A server.

    command: starts it at a port.
    ready: path that answers 200 when it can be used.
    fields: what its requests have beside prompt and length.
    """

    name: str
    command: Callable[[int], list[str]]
    ready: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """What every side gets."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens that a sequence needs room for."""
        return -(-(self.prompt_tokens + self.new_tokens) // _CONTEXT) * _CONTEXT

    def body(self, side: ServerSide) -> Callable[[int], dict[str, Any]]:
        """The request of a number, which is the same text for every side."""

        def of(number: int) -> dict[str, Any]:
            letters = random.Random(f"{self.seed} {number}").choices(string.ascii_letters, k=self.prompt_tokens)
            return {"prompt": "".join(letters), "max_tokens": self.new_tokens, "temperature": 0, **side.fields}

        return of


def topw_side(model: Path | str, load: Load, threads: int) -> ServerSide:
    folder = export_once(model, "--dtype", "fp32")

    def command(port: int) -> list[str]:
        words = [sys.executable, "-m", "topw_deploy", "serve", str(folder), "--served-model-name", "model"]
        sizes = ["--max-batch", str(load.streams), "--max-length", str(load.length), "--threads", str(threads)]
        return [*words, *sizes, "--provider", "cpu", "--port", str(port)]

    return ServerSide("topw serve", command, "/health", {"model": "model", "stream_options": {"include_usage": True}})


def gguf_file(model: Path, python: Path | None) -> Path:
    """The weights and the vocabulary for llama.cpp, written by `python` at first. Exits without either."""
    work = CACHE / "gguf"
    file = (work / f"{model.name}-F32-text.gguf").absolute()
    if not file.exists():
        if python is None:
            raise SystemExit(f"{file} is missing; give --llama-python, which writes it")
        work.mkdir(parents=True, exist_ok=True)
        with Worker("llama.cpp", HERE.with_name("llama_cpp_worker.py"), {"threads": 1}, python=python) as worker:
            write_float32_gguf(worker, model, file, texts=True)
    return file


def llama_server_side(file: Path, load: Load, threads: int, program: Path) -> ServerSide:
    """A slot per stream, `load.length` tokens each. Keeping ended prompts is off: none comes again."""

    def command(port: int) -> list[str]:
        words = [str(program), "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
        sizes = ["--parallel", str(load.streams), "--ctx-size", str(load.streams * load.length), "--cache-ram", "0"]
        return [*words, *sizes, "--threads", str(threads), "--threads-batch", str(threads), "--no-webui"]

    return ServerSide("llama.cpp's server", command, "/health", {"stream_options": {"include_usage": True}})


def llama_python_side(file: Path, load: Load, threads: int, python: Path) -> ServerSide:
    def command(port: int) -> list[str]:
        words = [str(python), "-m", "llama_cpp.server", "--model", str(file), "--n_ctx", str(load.length)]
        options = ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--interrupt_requests", "False"]
        return [*words, *options, "--verbose", "False", "--port", str(port)]

    return ServerSide("llama-cpp-python's server", command, "/v1/models", {})


def transformers_side(model: Path, load: Load, program: Path) -> ServerSide:
    name = str(model.absolute())

    def command(port: int) -> list[str]:
        options = ["--device", "cpu", "--dtype", "float32", "--continuous-batching"]
        # Otherwise its cache takes most of the machine's memory.
        blocks = ["--cb-block-size", str(_CONTEXT), "--cb-num-blocks", str(load.streams * load.length // _CONTEXT + 1)]
        sizes = [*blocks, "--cb-max-batch-tokens", str(max(load.streams, 512))]
        return [str(program), "serve", name, *options, *sizes, "--port", str(port)]

    return ServerSide("transformers serve", command, "/health", {"model": name})


@contextmanager
def run_server(side: ServerSide, threads: int) -> Iterator[str]:
    """Start a server. Yields its address. Exits with its last lines if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = _server_environment(threads)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(side.command(port), stdout=log, stderr=log, env=environment)
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


def _server_environment(threads: int) -> dict[str, str]:
    """The environment of a server: this repository, and `threads` threads for libraries that take them from there."""
    add_repository_to_pythonpath()
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


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
class SideResult:
    """The turns of a side. prompt_tokens: of its first request, as the server counts them."""

    name: str
    prompt_tokens: int = 0
    turns: list[Turn] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """New tokens per second, by turn."""
        return [turn.tokens / turn.seconds for turn in self.turns]

    @property
    def errors(self) -> Counter[str]:
        return sum((Counter(turn.errors) for turn in self.turns), Counter())

    def pooled(self, name: str) -> list[float]:
        """`first` or `gaps` of all turns."""
        return [value for turn in self.turns for value in getattr(turn, name)]

    def row(self) -> tuple[str, ...]:
        low, high = min(self.rates), max(self.rates)
        rate = f"{significant(statistics.median(self.rates))} ({significant(low)}-{significant(high)})"
        first, gaps = self.pooled("first"), self.pooled("gaps")
        faults = ", ".join(f"{number} x {what}" for what, number in sorted(self.errors.items())) or "none"
        waits = (
            _format_percentile(first, 50),
            _format_percentile(first, 99),
            _format_percentile(gaps, 50),
            _format_percentile(gaps, 99),
        )
        return self.name, rate, *waits, str(sum(turn.requests for turn in self.turns)), faults

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "tokens_per_second": self.rates,
            "first_text_seconds": _percentiles(self.pooled("first")),
            "between_texts_seconds": _percentiles(self.pooled("gaps")),
            "requests": sum(turn.requests for turn in self.turns),
            "errors": dict(self.errors),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99, 100)} if values else {}


def _format_percentile(values: Sequence[float], percent: float) -> str:
    return significant(percentile(values, percent) * 1e3) if values else ""


HEADER = ("server", "new tokens/s", "first text ms", "p99", "between texts ms", "p99", "requests", "errors")


def result_table(results: Sequence[SideResult]) -> str:
    """One row per side: rates by turn, waits pooled over the turns."""
    return table(HEADER, [result.row() for result in results])


def count_prompt_tokens(side: ServerSide, address: str, work: Load) -> int:
    """Serve one request whole. Returns the server's count of its prompt's tokens. Exits if it is refused."""
    body = {name: value for name, value in work.body(side)(-1).items() if name != "stream_options"}
    answer = httpx2.post(address + PATH, json=body, timeout=START_SECONDS)
    if answer.status_code != 200:
        raise SystemExit(f"{side.name} answers {answer.status_code}: {answer.text[:1000]}")
    return int(answer.json()["usage"]["prompt_tokens"])


async def take_turn(side: ServerSide, address: str, work: Load, seconds: float) -> Turn:
    # A connection for each request: llama.cpp's server at times closes one just when it is used again.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        return await run_load(client, work.body(side), work.streams, seconds)


def measure(sides: Sequence[ServerSide], work: Load, args: argparse.Namespace) -> list[SideResult]:
    """Start every server once, so that none fails later, and then take turns."""
    results: dict[str, SideResult] = {}
    for side in sides:
        with run_server(side, args.threads) as address:
            results[side.name] = SideResult(side.name, count_prompt_tokens(side, address, work))
    order = random.Random(work.seed)
    for number in range(args.rounds):
        for side in order.sample(sides, len(sides)):
            say(f"round {number + 1} of {args.rounds}: {side.name}")
            with run_server(side, args.threads) as address:
                count_prompt_tokens(side, address, work)  # warms it up
                turn = asyncio.run(take_turn(side, address, work, args.seconds / args.rounds))
            results[side.name].turns.append(turn)
    return list(results.values())


def chosen_sides(args: argparse.Namespace, work: Load) -> Iterator[ServerSide]:
    """Those that are named, and ours."""
    model = Path(tiny_model_path()) if args.model == "demo" else llama_50m()
    yield topw_side("demo" if args.model == "demo" else model, work, args.threads)
    if args.llama_server is not None:
        yield llama_server_side(gguf_file(model, args.llama_python), work, args.threads, args.llama_server)
    if args.llama_python is not None:
        yield llama_python_side(gguf_file(model, args.llama_python), work, args.threads, args.llama_python)
    if args.transformers is not None:
        yield transformers_side(model, work, args.transformers)


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
    work = Load(args.streams, args.prompt_tokens, args.new_tokens, args.seed)
    results = measure(list(chosen_sides(args, work)), work, args)
    print(
        f"\n{machine()}; {args.model}, {args.streams} streams, {args.threads} threads\n\n{result_table(results)}",
        flush=True,
    )
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
        document = {"machine": machine(), "settings": settings, "sides": [result.as_dict() for result in results]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

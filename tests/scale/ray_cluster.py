"""Starts Ray and `serve run` with the example's configuration, kills a replica under load, and adds and removes one.

python tests/scale/ray_cluster.py RAY_BIN FOLDER        prints what it saw as JSON

A process of its own, because tests may not use the network. RAY_BIN has `ray` and `serve`; FOLDER is an export.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.scale import free_port, until
from topw_deploy.engine import Engine
from topw_deploy.runtime import TopWModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "scale" / "ray.yaml"
HOT = {"temperature": 1.5, "lam": 0.3}
SYSTEM = "import collections\nimport functools\n" * 10  # longer than `prefix_characters`
REQUESTS, TOKENS = 24, 200
ROWS = 4
SEPARATOR = "\0"
# The streams last longer than the autoscaler takes to remove a replica. Their prompts begin differently, so that each
# replica gets at least one.
STREAMED = ("class Stream", "def stream(", "import stream")
SAMPLES, LONG = 48, 400
COMPARED = 8  # samples
DRAIN = 480  # seconds; more than the streams take on a busy machine
# Reports to the autoscaler and to the metrics come every second, not every 10. Replicas have the niceness of other
# processes: at Ray's own, 15, other tests would starve them.
SETTINGS = {
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_metrics_report_interval_ms": "1000",
    "RAY_worker_niceness": "0",
}
SOON = {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 1}
# One client, because making one costs tens of milliseconds. No connection is used twice, so none is found closed.
CLIENT = httpx2.Client(timeout=120, limits=httpx2.Limits(max_keepalive_connections=0))


def descendants(root: int) -> dict[int, str]:
    """The command line of every process under `root`, by its id."""
    parents, commands = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                commands[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    found = {root}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands.get(child, "") for child in found}


class Cluster:
    """Ray on this machine with the example's application, first with two replicas."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="ray"))  # short: its sockets' paths have at most 107 characters
        self.port, self.metrics_port, self._processes = free_port(), free_port(), []
        self._binaries, self._folder, self._address = binaries, folder, f"127.0.0.1:{free_port()}"
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start Ray and the application, and wait until it answers."""
        port = self._address.rpartition(":")[2]
        head = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
        head += ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={self.place}/r"]
        head += [f"--metrics-export-port={self.metrics_port}", "--object-store-memory=80000000"]
        self.head = self._start(self._binaries / "ray", *head)
        until(lambda: self.check_running() and "Ray runtime started" in self.log(), "Ray")
        self.run(least=2)
        until(self.is_healthy, "the application")

    def run(self, least: int) -> None:
        """Run `serve run` with `least` to two replicas. A second call changes the application of the first."""
        config = yaml.safe_load(EXAMPLE.read_text("utf-8"))
        config["http_options"] = {**config["http_options"], "host": "127.0.0.1", "port": self.port}
        application = config["applications"][0]
        application["args"] = {**application["args"], "models": {"demo": str(self._folder.resolve())}}
        application["args"] |= {"engine": {"max_batch": ROWS}, "drain_timeout": DRAIN, "load_factor": 1}
        for deployment in application["deployments"]:
            deployment["ray_actor_options"] = {"num_cpus": 0.5}
            if deployment["name"] == "Replica":
                scaling = {"min_replicas": least, "max_replicas": 2, "target_ongoing_requests": ROWS}
                deployment["autoscaling_config"] |= {**scaling, **SOON}
                deployment["graceful_shutdown_timeout_s"] = DRAIN
        written = self.place / f"ray{least}.yaml"
        written.write_text(yaml.safe_dump(config), "utf-8")
        self._start(self._binaries / "serve", "run", f"--address={self._address}", str(written))

    def _start(self, *words: object) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "RAY_DEDUP_LOGS": "0", **SETTINGS}
        with (self.place / "log").open("ab") as log:
            process = subprocess.Popen(
                list(map(str, words)), stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self._processes.append(process)
        return process

    def log(self) -> str:
        return (self.place / "log").read_text("utf-8", "replace")

    def check_running(self) -> bool:
        """Raises SystemExit if Ray or `serve run` has ended."""
        if any(process.poll() is not None for process in self._processes):
            raise SystemExit(f"Ray ended:\n{self.log()[-5000:]}")
        return True

    def is_healthy(self) -> bool:
        self.check_running()
        try:
            return CLIENT.get(f"{self.url}/health", timeout=5).status_code == 200 and len(self.replicas()) == 2
        except httpx2.TransportError:
            return False

    def replicas(self) -> list[int]:
        """Process ids of the replicas."""
        named = re.compile(r"ray::ServeReplica:topw:Replica")
        return [child for child, command in descendants(self.head.pid).items() if named.search(command)]

    def metrics(self) -> str:
        """What the node exports for Prometheus."""
        try:
            return CLIENT.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30).text
        except httpx2.TransportError:
            return ""

    def close(self) -> None:
        """End every process that was started here."""
        for process in self._processes[-1:]:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        started = [child for process in self._processes for child in descendants(process.pid)]
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


def body(prompt: str, seed: int, *, stream: bool = False, tokens: int = TOKENS) -> dict[str, Any]:
    given = {"model": "demo", "prompt": prompt, "seed": seed, "max_tokens": tokens, "ignore_eos": True}
    return {**given, **HOT, "stream": stream}


def ask(url: str, given: dict[str, Any], begun: threading.Event | None = None, name: str = "") -> tuple[str, str]:
    """("text", answer) or ("error", code); a connection that breaks off without an error is ("lost", reason).

    The text of a stream of several samples has SEPARATOR between them.
    begun: set at the first bytes of the answer. name: the request's id.
    """
    headers = {"X-Request-Id": name} if name else None
    try:
        with CLIENT.stream("POST", f"{url}/v1/completions", json=given, headers=headers) as response:
            parts = []
            for part in response.iter_bytes():
                parts.append(part)
                if begun is not None:
                    begun.set()
        raw = b"".join(parts).decode()
    except httpx2.TransportError as error:
        return "lost", repr(error)
    if response.status_code != 200:
        return "error", f"{response.status_code} {json.loads(raw)['error']['code']}"
    if not given["stream"]:
        return "text", json.loads(raw)["choices"][0]["text"]
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    failed = next((event["error"]["code"] for event in events if "error" in event), None)
    if failed is not None:
        return "error", failed
    if data[-1:] != ["[DONE]"]:
        return "lost", "no [DONE]"
    texts: dict[int, str] = {}
    ended = set()
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ended |= {choice["index"]} if choice["finish_reason"] else set()
    if len(ended) != given.get("n", 1):
        return "lost", f"{len(ended)} samples have a finish_reason"
    return "text", SEPARATOR.join(texts[index] for index in sorted(texts))


def send_burst(url: str) -> Iterator[tuple[str, str] | None]:
    """Send all requests at once, half of them as streams. Yields None once a stream has begun, then the outcomes."""
    begun = threading.Event()
    outcomes: list[tuple[str, str]] = [("lost", "no answer")] * REQUESTS

    def call(index: int) -> None:
        outcomes[index] = ask(url, body(f"def f{index}(", index, stream=bool(index % 2)), begun)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(REQUESTS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    yield None
    for thread in threads:
        thread.join()
    yield from outcomes


def main() -> None:
    binaries, folder = Path(sys.argv[1]), Path(sys.argv[2])
    started = time.perf_counter()
    with TopWModel.from_pretrained(folder, provider="cpu", intra_op_num_threads=1) as model:
        wanted = [
            model.generate(f"def f{index}(", seed=index, max_new_tokens=TOKENS, ignore_eos=True, **HOT).text
            for index in range(REQUESTS)
        ]
        samples = [draw_samples(model, prompt) for prompt in STREAMED]
    cluster = Cluster(binaries, folder)
    seen: dict[str, Any] = {}
    try:
        cluster.start()
        seen["start_seconds"] = time.perf_counter() - started
        seen["alone"] = [ask(cluster.url, body("def f0(", 0))[1] == wanted[0]]
        seen["streamed"] = [ask(cluster.url, body("def f1(", 1, stream=True))[1] == wanted[1]]
        seen["prefixes"] = reused_tokens(cluster.url)
        seen["errors"] = request_statuses(cluster.url)
        seen["left"] = leave_stream(cluster)
        outcomes = send_burst(cluster.url)
        next(outcomes)
        victim = cluster.replicas()[0]
        os.kill(victim, signal.SIGKILL)
        seen["killed"] = compare_outcomes(outcomes, wanted)
        until(lambda: cluster.is_healthy() and victim not in cluster.replicas(), "the new replica")
        outcomes = send_burst(cluster.url)
        next(outcomes)
        seen["recovered"] = compare_outcomes(outcomes, wanted)
        seen["log"] = [line[-300:] for line in cluster.log().splitlines() if "replica ended" in line]
        names: set[str] = set()  # a busy machine reports a gauge late, and Ray leaves it out until then

        def has_metrics() -> bool:
            names.update(re.findall(r"^ray_(topw_\w+)\{", cluster.metrics(), re.MULTILINE))
            return {"topw_certified_tokens_total", "topw_num_requests_waiting"} <= names  # of requests, and of engines

        until(has_metrics, "the metrics of requests and engines")
        seen["metrics"] = sorted(names)
        before = time.perf_counter()
        seen["scaled"] = scale_replicas(cluster, wanted, samples)
        seen["scaled"]["seconds"] = time.perf_counter() - before
    finally:
        cluster.close()
    seen["seconds"] = time.perf_counter() - started
    sys.stdout.write(json.dumps(seen) + "\n")


def draw_samples(model: TopWModel, prompt: str) -> list[str]:
    """The first texts of a stream, by an engine with as many rows as a replica."""
    options = {"num_return_sequences": COMPARED, "max_new_tokens": LONG, "ignore_eos": True, "seed": 1, **HOT}
    with Engine(model, max_batch=ROWS) as engine:
        return [each.text for each in engine.submit(prompt, **options).result()]


def compare_outcomes(outcomes: Iterator[tuple[str, str] | None], wanted: list[str]) -> list[tuple[str, str | bool]]:
    """("text", whether it is the wanted one), ("error", code) or ("lost", reason) for each request."""
    found = enumerate(outcome for outcome in outcomes if outcome is not None)
    return [(kind, text == wanted[index] if kind == "text" else text) for index, (kind, text) in found]


def scale_replicas(cluster: Cluster, wanted: list[str], samples: list[list[str]]) -> dict[str, Any]:
    """Let the autoscaler remove an idle replica, add one under a burst, and remove one that streams.

    wanted, samples: the answers to the burst's requests, and the first samples of each stream.
    Returns the outcomes of the burst; of each stream its kind, the share of samples that are the wanted ones, its
    replica's process id, and whether it ended after the autoscaler had begun to remove a replica; and the process ids
    of the removed replica.
    """
    cluster.run(least=1)
    until(lambda: cluster.check_running() and len(cluster.replicas()) == 1, "the removal of an idle replica")
    outcomes: list[tuple[str, str | bool]] = []
    enough = threading.Event()

    def call(index: int) -> None:
        while not enough.is_set():
            kind, text = ask(cluster.url, body(f"def f{index}(", index))
            outcomes.append((kind, text == wanted[index] if kind == "text" else text))

    streams: list[tuple[str, str | float, float]] = [("lost", "no answer", 0.0)] * len(STREAMED)

    def follow(index: int) -> None:
        given = {**body(STREAMED[index], 1, stream=True, tokens=LONG), "n": SAMPLES}
        kind, text = ask(cluster.url, given, name=f"stream-{index}-")
        same = [one == other for one, other in zip(text.split(SEPARATOR), samples[index], strict=False)]
        streams[index] = kind, sum(same) / COMPARED if kind == "text" else text, time.monotonic()

    burst = [threading.Thread(target=call, args=(index,)) for index in range(4 * ROWS)]
    followers = [threading.Thread(target=follow, args=(index,)) for index in range(len(STREAMED))]
    for thread in burst:
        thread.start()
    until(lambda: len(cluster.replicas()) == 2, "a second replica")
    two, removals = cluster.replicas(), cluster.log().count("Downscaling")
    enough.set()
    for thread in burst:
        thread.join()
    for thread in followers:  # before the load has been low for `downscale_delay_s`
        thread.start()
    until(lambda: cluster.log().count("Downscaling") > removals, "the removal of a replica")
    removed = time.monotonic()
    for thread in followers:
        thread.join()
    until(lambda: len(cluster.replicas()) == 1, "the end of the removed replica", DRAIN)
    found = []
    for index, (kind, value, ended) in enumerate(streams):
        line = re.compile(rf'pid=(\d+).*"event".*stream-{index}-')
        if kind == "text":  # Ray copies the lines of a replica to the log later
            until(lambda line=line: line.search(cluster.log()), f"the log line of stream {index}")
        logged = line.search(cluster.log())
        found.append((kind, value, int(logged[1]) if logged else 0, ended > removed))
    return {"burst": outcomes, "streams": found, "removed": list(set(two) - set(cluster.replicas()))}


def reused_tokens(url: str) -> list[int]:
    """Reused tokens of prompts that begin alike, one after the other."""
    found = []
    for index in range(8):
        answer = CLIENT.post(f"{url}/v1/completions", json=body(f"{SYSTEM}x{index}", 0, tokens=1)).json()
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return found


def leave_stream(cluster: Cluster) -> str:
    """Close a stream after its first bytes. Returns the replica's log line of that request."""
    given = body("class Left", 0, stream=True, tokens=450)
    headers = {"X-Request-Id": "one-that-leaves"}
    with CLIENT.stream("POST", f"{cluster.url}/v1/completions", json=given, headers=headers) as response:
        next(response.iter_bytes())

    def line() -> str:
        found = (each for each in cluster.log().splitlines() if "one-that-leaves" in each and '"event"' in each)
        return next(found, "")

    until(line, "the end of a request whose client left")
    return line()


def request_statuses(url: str) -> list[int]:
    """Statuses of requests that must be refused, and of those that must not."""
    unknown = CLIENT.post(f"{url}/v1/completions", json={"prompt": "a", "tempreature": 1})
    large = CLIENT.post(f"{url}/v1/completions", content=b" " * (8 * 2**20 + 1))
    gets = [CLIENT.get(f"{url}{path}") for path in ("/v1/models", "/live", "/nowhere", "/metrics")]
    return [each.status_code for each in (unknown, large, *gets)]


if __name__ == "__main__":
    main()

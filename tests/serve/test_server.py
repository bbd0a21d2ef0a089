"""`topw serve` in a process of its own, called by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.serve.conftest import HELLO, HOT, RENDERED, UNLIMITED
from tests.support.waiting import HANG, until
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow

OPTIONS = ["--provider", "cpu", "--threads", "1"]
OPTIONS += [word for name, seconds in UNLIMITED.items() for word in (f"--{name.replace('_', '-')}", str(seconds))]
SERVER = "http://server"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A server at a Unix socket, as tests may not use the network."""
    place = Path(tempfile.mkdtemp(prefix="topw"))  # short: a socket's path has at most 107 characters
    words = [sys.executable, "-m", "topw_deploy", "serve", str(folder), "--uds", str(place / "s"), *OPTIONS]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: process.poll() is not None or health(place / "s") == 200)
            yield process, place / "s"
        finally:
            process.kill()
    shutil.rmtree(place)


def health(uds: Path) -> int:
    """The status of /health; 0 if nobody listens."""
    try:
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(uds)), timeout=HANG) as client:
            return int(client.get(f"{SERVER}/health").status_code)
    except httpx2.TransportError:
        return 0


def test_many_streams_at_once_get_their_own_texts(server: Any, model: TopWModel) -> None:
    async def text(client: Any, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="toy", messages=HELLO, max_tokens=10, seed=seed, temperature=2.5, extra_body={"lam": 0.2}, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        http = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(server[1])), timeout=HANG)
        async with openai.AsyncOpenAI(base_url=f"{SERVER}/v1", api_key="any", http_client=http) as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(16)))

    found = asyncio.run(main())
    for seed, one in enumerate(found):
        assert one == model.generate(RENDERED, add_special_tokens=False, max_new_tokens=10, seed=seed, **HOT).text


def test_sigterm_drains(server: Any) -> None:
    """A stream goes on to its end; then the server ends."""
    process, uds = server
    seen: list[str] = []
    body = {"messages": HELLO, "ignore_eos": True, "n": 8, "stream": True, "seed": 1}
    begun = threading.Event()

    def read() -> None:
        http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(uds)), timeout=HANG)
        with http, http.stream("POST", f"{SERVER}/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                seen.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(HANG)
    process.send_signal(signal.SIGTERM)
    reader.join(HANG)
    assert sum('"finish_reason":"length"' in line for line in seen) == 8, "no sequence was cancelled"
    assert process.wait(HANG) == 0
    lines = [json.loads(line) for line in process.stderr or ()]
    assert {"listening", "opened", "stopping", "draining", "request"} <= {line["event"] for line in lines}
    assert not uds.exists()


def test_a_killed_server_leaves_nothing_but_its_socket_and_the_next_one_answers_there(
    folder: Path, model: TopWModel, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    places = {name: str(tmp_path / name.lower()) for name in ("HOME", "TMPDIR")}
    for each in places.values():
        Path(each).mkdir()
    with tempfile.TemporaryDirectory(prefix="topw") as place:
        uds = Path(place) / "s"
        words = [sys.executable, "-m", "topw_deploy", "serve", str(folder), "--uds", str(uds), *OPTIONS]
        body = {"messages": HELLO, "seed": 5, "ignore_eos": True, **HOT}
        for is_killed in (True, False):
            http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(uds)), timeout=HANG)
            environment = {**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"}
            with subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment) as process, http:
                try:
                    until(lambda: health(uds) == 200)
                    if is_killed:
                        many = {**body, "n": 64, "stream": True}
                        with http.stream("POST", f"{SERVER}/v1/chat/completions", json=many) as response:
                            lines = response.iter_lines()
                            assert next(lines).startswith("data: ")
                            process.kill()
                            with pytest.raises(httpx2.TransportError):
                                list(lines)
                    else:
                        answer = http.post(f"{SERVER}/v1/chat/completions", json={**body, "max_tokens": 9}).json()
                finally:
                    process.kill()
            assert uds.exists(), "it was killed"
    found = answer["choices"][0]["message"]["content"]
    assert found == model.generate(RENDERED, add_special_tokens=False, max_new_tokens=9, seed=5, **HOT).text
    assert [path for each in places.values() for path in Path(each).rglob("*")] == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


OPENS_SLOWLY = """
import sys, time
from topw_deploy.cli.main import main
from topw_deploy.serve.service import Served
Served.open = classmethod(lambda *arguments: time.sleep(10**6))
main(sys.argv[1:])
"""


def test_sigterm_while_a_model_is_opened_ends_the_server_at_once(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="topw") as place:
        uds = Path(place) / "s"
        words = [sys.executable, "-c", OPENS_SLOWLY, "serve", str(folder), "--uds", str(uds)]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
            try:
                until(lambda: uds.exists() and health(uds) == 503)
                process.send_signal(signal.SIGTERM)
                assert process.wait(HANG) == 0
            finally:
                process.kill()
            lines = [json.loads(line) for line in process.stderr or ()]
        assert (lines[0]["event"], lines[-1]["event"]) == ("listening", "stopping")
        assert not uds.exists()


def test_a_folder_that_is_no_export_ends_the_server_before_it_listens(tmp_path: Path) -> None:
    (tmp_path / "not").mkdir()
    words = [sys.executable, "-m", "topw_deploy", "serve", str(tmp_path / "not"), "--uds", str(tmp_path / "s")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: "), "the log begins only for models"


def test_a_length_beyond_the_context_ends_the_server_before_it_listens(folder: Path) -> None:
    words = [sys.executable, "-m", "topw_deploy", "serve", str(folder), "--port", "0", "--max-length", "1000000000"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG)
    assert done.returncode != 0
    assert "Error: --max-length is 1000000000, but the model's context holds" in done.stderr
    assert "listening" not in done.stderr

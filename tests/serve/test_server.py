"""`topw serve` in a process of its own, called by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.serve.conftest import HELLO, HOT, RENDERED, UNLIMITED, export_caller
from tests.support.waiting import HANG, until
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.slow

KEY = "sk-test"
OPTIONS = ["--provider", "cpu", "--threads", "1", "--api-key", KEY]
OPTIONS += [word for name, seconds in UNLIMITED.items() for word in (f"--{name.replace('_', '-')}", str(seconds))]
# No connection is used twice, so the server has closed none of them after being idle.
CLIENT: dict[str, Any] = {"timeout": HANG, "limits": httpx2.Limits(max_keepalive_connections=0)}


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Start servers at Unix sockets, as tests may not use the network."""
    processes: list[subprocess.Popen[str]] = []
    place = Path(tempfile.mkdtemp(prefix="topw"))  # short: a socket's path has at most 107 characters

    def start(*arguments: str) -> tuple[subprocess.Popen[str], Path]:
        uds = place / f"{len(processes)}.sock"
        words = [sys.executable, "-m", "topw_deploy", "serve", *arguments, "--uds", str(uds), *OPTIONS]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        processes.append(process)

        def answers() -> bool:
            if process.poll() is not None:
                assert process.stderr is not None
                raise AssertionError(process.stderr.read())
            return uds.exists() and health(uds) == 200

        until(answers)
        return process, uds

    yield start
    for process in processes:
        process.kill()
        process.communicate()
    shutil.rmtree(place)


def new_http(uds: Path, **options: Any) -> httpx2.Client:
    """An HTTP client of the server at a Unix socket."""
    transport = httpx2.HTTPTransport(uds=str(uds), limits=CLIENT["limits"])
    return httpx2.Client(transport=transport, timeout=CLIENT["timeout"], **options)


def health(uds: Path) -> int:
    """The status of /health; 0 if nobody listens."""
    try:
        with new_http(uds) as client:
            return int(client.get("http://server/health").status_code)
    except httpx2.TransportError:
        return 0


@pytest.fixture(scope="module")
def uds(started: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = export_caller(tmp_path_factory.mktemp("caller") / "caller")
    path: Path = started(str(folder), str(place))[1]
    return path


@pytest.fixture
def client(uds: Path) -> Iterator[Any]:
    with openai.OpenAI(base_url="http://server/v1", api_key=KEY, http_client=new_http(uds), max_retries=0) as client:
        yield client


def test_openais_client_lists_models_and_chats(client: Any, model: TopWModel) -> None:
    assert {each.id for each in client.models.list()} == {"toy", "caller"}
    given: dict[str, Any] = {"max_tokens": 8, "seed": 5, "temperature": 2.5, "extra_body": {"lam": 0.2}}
    answer = client.chat.completions.create(model="toy", messages=HELLO, **given)
    wanted = model.generate(RENDERED, add_special_tokens=False, max_new_tokens=8, seed=5, **HOT).text
    assert answer.choices[0].message.content == wanted
    assert answer.usage.total_tokens == 15
    options = {"include_usage": True}
    stream = client.chat.completions.create(model="toy", messages=HELLO, stream=True, stream_options=options, **given)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted
    assert chunks[-1].usage.completion_tokens == 8


def test_openais_client_reads_completions_and_responses(client: Any, model: TopWModel) -> None:
    wanted = model.generate("ab", max_new_tokens=6, seed=2, temperature=2.0).text
    given: dict[str, Any] = {"model": "toy", "seed": 2, "temperature": 2.0}
    assert client.completions.create(prompt="ab", max_tokens=6, **given).choices[0].text == wanted
    del given["seed"]
    extra = {"seed": 2}
    response = client.responses.create(input="Hi", max_output_tokens=6, extra_body=extra, **given)
    with client.responses.stream(input="Hi", max_output_tokens=6, extra_body=extra, **given) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert response.output_text == text
    assert response.usage.output_tokens == 6


def test_errors_are_the_client_s_own(client: Any, uds: Path) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="toy", messages=HELLO, extra_body={"tempreature": 1})
    assert (raised.value.code, raised.value.param) == ("unknown_parameter", "tempreature")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    other = openai.OpenAI(base_url="http://server/v1", api_key="no", http_client=new_http(uds), max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_many_streams_at_once_get_their_own_texts(uds: Path, model: TopWModel) -> None:
    async def text(client: Any, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="toy", messages=HELLO, max_tokens=10, seed=seed, temperature=2.5, extra_body={"lam": 0.2}, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        http = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(uds)), timeout=HANG)
        async with openai.AsyncOpenAI(base_url="http://server/v1", api_key=KEY, http_client=http) as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(16)))

    found = asyncio.run(main())
    for seed, one in enumerate(found):
        assert one == model.generate(RENDERED, add_special_tokens=False, max_new_tokens=10, seed=seed, **HOT).text


def test_sigterm_drains(started: Any, folder: Path) -> None:
    """A stream goes on to its end; then the server ends."""
    process, uds = started(str(folder), "--max-length", "96")
    http = new_http(uds, headers={"Authorization": f"Bearer {KEY}"})
    seen: list[str] = []
    body = {"messages": HELLO, "ignore_eos": True, "n": 8, "stream": True, "seed": 1}
    begun = threading.Event()

    def read() -> None:
        with http.stream("POST", "http://server/v1/chat/completions", json=body) as response:
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


def test_a_folder_that_is_no_export_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "not").mkdir()
    words = [sys.executable, "-m", "topw_deploy", "serve", str(tmp_path / "not"), "--uds", str(tmp_path / "s")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")

"""`python -m benchmarks.serve_http`: the load and its report. The servers are doubles."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks import http_load, serve_http
from benchmarks.http_load import PATH, Answer, Turn, run_load
from benchmarks.serve_http import (
    HEADER,
    Load,
    ServerSide,
    SideResult,
    gguf_file,
    llama_server_side,
    percentile,
    result_table,
)
from tests.support.waiting import until_async

ROOT = Path(__file__).parents[2]
LLAMA_SERVER = Path(__file__).with_name("llama_server.py")


def chunk(text: str, reason: str | None = None, **fields: Any) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}], **fields})


def fed(*lines: tuple[float, str]) -> Answer:
    answer = Answer(10.0, 7)
    for now, line in lines:
        answer.feed(line, now)
    answer.close()
    return answer


def test_an_answer_has_the_times_of_its_texts() -> None:
    usage = "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 5}})
    answer = fed(
        (10.5, chunk("")),
        (11.0, chunk("a", usage=None)),
        (11.25, ": keep-alive"),
        (12.0, chunk("bc")),
        (14.0, chunk("d", "stop")),
        (14.5, usage),
        (14.5, "data: [DONE]"),
    )
    assert (answer.texts, list(answer.gaps)) == ([11.0, 12.0, 14.0], [1.0, 2.0])
    assert (answer.tokens, answer.ended, answer.error) == (5, True, None)


def test_without_counts_an_answer_of_full_length_has_its_limit() -> None:
    assert fed((11.0, chunk("a")), (12.0, chunk("", "length"))).tokens == 7
    assert fed((11.0, chunk("a")), (12.0, chunk("", "stop"))).tokens == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("data: {", "an event is not JSON"),
        ('data: {"error": {}}', "an error in the stream"),
        (chunk("a"), "the stream ended early"),
        ("data: [DONE]", "the stream ended early"),
    ],
)
def test_what_goes_wrong_in_a_stream(line: str, error: str) -> None:
    assert fed((11.0, line)).error == error


def test_a_load_counts_answers_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = begun = 0

    async def completions(request: Request) -> Response:
        nonlocal running, most, begun
        begun += 1
        number = int((await request.json())["prompt"])
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)  # so that the others run
        running -= 1
        if number == 3:
            return Response(status_code=503)
        if number == 4:
            raise httpx2.ReadError("gone")

        async def events() -> AsyncIterator[str]:
            yield chunk("a") + "\n\n"
            yield chunk("b", None if number == 5 else "length") + "\n\n"

        return StreamingResponse(events())

    async def until_twenty(callers: list[Any], timeout: float, return_when: str) -> tuple[set[Any], set[Any]]:
        assert timeout == 0.5
        await until_async(lambda: begun >= 20)
        return set(), set(callers)

    async def main() -> Turn:
        transport = httpx2.ASGITransport(Starlette(routes=[Route(PATH, completions, methods=["POST"])]))
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            return await run_load(client, lambda number: {"prompt": str(number), "max_tokens": 2}, 4, 0.5)

    monkeypatch.setattr(http_load.asyncio, "wait", until_twenty)
    turn = asyncio.run(main())
    assert turn.errors == {"status 503": 1, "ReadError": 1, "the stream ended early": 1}
    assert most == 4
    assert turn.requests >= 20 - 3 - 4
    assert 2 * turn.requests <= turn.tokens <= 2 * (turn.requests + 5)
    assert len(turn.first) >= turn.requests
    assert min([*turn.first, *turn.gaps]) >= 0
    assert turn.seconds > 0


def test_a_fault_of_the_load_itself_is_raised() -> None:
    def body(number: int) -> dict[str, Any]:
        raise KeyError(number)

    async def main() -> None:
        async with httpx2.AsyncClient(base_url="http://server") as client:
            await run_load(client, body, 1, 30.0)

    with pytest.raises(KeyError):
        asyncio.run(main())


def test_every_side_gets_the_same_prompts() -> None:
    work = Load(streams=2, prompt_tokens=30, new_tokens=5)
    one, other = (ServerSide(name, lambda port: [], "/", {"model": name}) for name in "ab")
    prompts = [work.body(one)(number) for number in (0, 1, 0)]
    assert prompts[0] == prompts[2] != prompts[1]
    assert {**work.body(other)(1), "model": "a"} == prompts[1]
    assert (len(prompts[0]["prompt"]), prompts[0]["max_tokens"], work.length) == (30, 5, 256)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 99.9, 100)] == [1, 100, 198, 200, 200]
    assert percentile([3.0], 50) == 3.0


def test_the_report_pools_the_turns() -> None:
    turns = [Turn(2.0, 3, 200, [0.1], [0.01] * 98, {}), Turn(4.0, 1, 200, [0.3], [0.5, 0.7], {"status 503": 2})]
    result = SideResult("one", 30, turns)
    cells = [cell.strip() for cell in result_table([result]).splitlines()[2].split("|")[1:-1]]
    assert dict(zip(HEADER, cells, strict=False))["new tokens/s"] == "75.0 (50.0-100)"
    assert cells == ["one", "75.0 (50.0-100)", "100", "300", "10.0", "500", "4", "2 x status 503"]
    assert result.as_dict()["between_texts_seconds"] == {"p50": 0.01, "p90": 0.01, "p99": 0.5, "p100": 0.7}
    assert result_table([SideResult("two", 30, [Turn(1.0)])]).splitlines()[2].split("|")[-2].strip() == "none"


def test_llama_server_has_a_slot_of_full_length_for_each_stream() -> None:
    side = llama_server_side(
        Path("/w.gguf"), Load(streams=64, prompt_tokens=128, new_tokens=64), 2, Path("/bin/server")
    )
    program, *words = side.command(8123)
    assert program == "/bin/server"
    assert words.pop() == "--no-webui"
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--model": "/w.gguf",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--parallel": "64",
        "--ctx-size": str(64 * 256),
        "--cache-ram": "0",
        "--threads": "2",
        "--threads-batch": "2",
    }


def test_weights_for_llama_cpp_need_its_python_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_http, "CACHE", tmp_path)
    with pytest.raises(SystemExit, match=r"model-F32-text\.gguf is missing; give --llama-python"):
        gguf_file(Path("model"), None)
    (tmp_path / "gguf").mkdir()
    written = tmp_path / "gguf" / "model-F32-text.gguf"
    written.touch()
    assert gguf_file(Path("model"), None) == written


MEASURE = """
import argparse, json, pathlib, sys
from benchmarks.serve_http import Load, llama_server_side, measure
work = Load(streams=3, prompt_tokens=30, new_tokens=5)
side = llama_server_side(pathlib.Path(__file__), work, 1, pathlib.Path(sys.argv[1]))
results = measure([side], work, argparse.Namespace(threads=1, rounds=2, seconds=0.4))
print(json.dumps([result.as_dict() for result in results]))
"""


@pytest.mark.slow
def test_a_server_is_started_for_each_turn_and_measured(tmp_path: Path) -> None:
    """In another process, because tests may not use the network."""
    program, driver = tmp_path / "llama-server", tmp_path / "measure.py"
    program.write_text(f"#!{sys.executable}\n{LLAMA_SERVER.read_text('utf-8')}", "utf-8")
    program.chmod(0o755)
    driver.write_text(MEASURE, "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "STARTS": str(tmp_path)}
    command = [sys.executable, str(driver), str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout)
    assert (found["name"], found["prompt_tokens"], found["errors"]) == ("llama.cpp's server", 30, {})
    assert len(found["tokens_per_second"]) == 2
    assert min(found["tokens_per_second"]) > 0
    assert found["requests"] > 6
    assert len(list(tmp_path.glob("*.started"))) == len(list(tmp_path.glob("*.ended"))) == 3

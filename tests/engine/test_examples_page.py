"""The programs of docs/guide/examples.md run, and do what the page says."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Gate
from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG, until_async
from topw_deploy.engine import Engine
from topw_deploy.engine.waiting import HOLD

pytestmark = pytest.mark.slow  # imports FastAPI

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "examples.md"
TEMPLATE = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }}\n{% endfor %}a:"


@pytest.fixture
def run(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[dict[str, Any], str]]:
    """Runs the program under "One-off", then that under another heading. Returns (their variables, the last output)."""
    export(tmp_path / "out", toy, form="grouped", chat_template=TEMPLATE)
    monkeypatch.chdir(tmp_path)
    sections = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    blocks = {
        name: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for name, text in texts.items()
    }
    assert all(len(found) == 1 for found in blocks.values())
    names: dict[str, Any] = {}

    def run(heading: str) -> tuple[dict[str, Any], str]:
        for name in dict.fromkeys(("One-off", heading)):
            capsys.readouterr()
            exec(blocks[name][0], names)
        return names, capsys.readouterr().out

    return run


def test_a_single_request_prints_what_generate_returns(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    names, out = run("One-off")
    assert out == names["model"].generate("def parse(", max_new_tokens=40, seed=7).text + "\n"


def test_a_chat_reuses_its_turns(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    names, out = run("Chat")
    (first, _), (second, of) = re.findall(r"\[(\d+) of (\d+) tokens reused\]", out)
    assert int(first) == 0
    assert 0 < int(second) < int(of)
    assert [one["role"] for one in names["messages"]] == ["user", "assistant"] * 2


def test_the_program_for_sessions_reads_its_prompt_once(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    _, out = run("A session in a file")
    assert re.search(r"^SessionInfo\(tokens=24, bytes=\d+\)\n24 of 33 tokens reused$", out, re.MULTILINE)
    assert run("A session in a file")[1] == out  # loaded


def test_the_program_for_cancelling_ends_its_requests(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    """A fast machine may finish a request before its deadline."""
    first, deadline, task = run("Cancelling")[1].splitlines()
    assert first in {"cancelled", "length"}
    assert deadline in {"timeout", "length", "stop"}
    assert task == "None" or task.startswith("GenerationResult(")


def test_a_batch_job_answers_every_prompt(run: Callable[[str], tuple[dict[str, Any], str]], tmp_path: Path) -> None:
    prompts = [f"prompt {i}" for i in range(60)]
    prompts[7] = "x" * 200  # longer than the context
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    run("A batch job")
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in found] == prompts
    assert "200" in found[7]["error"]
    assert all("text" in one for one in found if one["prompt"] != prompts[7])


def test_extracted_fields_match_their_schema(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    names, out = run("Structured extraction")
    assert len(out.splitlines()) == 2
    found = [request.result() for request in names["requests"]]
    complete = [json.loads(one.text) for one in found if one.finish_reason == "stop"]
    assert all(set(one) == {"name", "kind"} and one["kind"] in {"class", "function"} for one in complete)
    assert complete


class Client:
    """A caller of an ASGI application, which may disconnect."""

    def __init__(self, app: Any, prompt: str, **given: Any) -> None:
        self._body = json.dumps({"prompt": prompt, **given}).encode()
        self.app, self.gone, self.sent = app, asyncio.Event(), asyncio.Event()
        self.status, self.content = 0, b""

    async def call(self) -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": "/generate", "raw_path": b"/generate", "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "client": ("1.2.3.4", 5), "server": ("a", 80),
            "app": self.app, "state": {},
        }  # fmt: skip
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.content += message.get("body", b"")
            self.sent.set()
            await asyncio.sleep(0)


def outlast_hold(ids: Any) -> bool:
    """A stopping criterion that takes HOLD seconds, so that the tokens of each step are delivered after the step."""
    time.sleep(HOLD)
    return False


async def use_app(app: Any, use: Callable[[Engine], Any]) -> None:
    async with app.router.lifespan_context(app):
        await use(app.state.engine)


def test_a_server_streams_and_answers_errors(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    names, _ = run("An HTTP server")
    app, model = names["app"], names["model"]

    async def use(engine: Engine) -> None:
        answered, wrong, refused = Client(app, "abc", max_new_tokens=9), Client(app, "x" * 200), Client(app, "abc")
        await answered.call()
        assert (answered.status, answered.content.decode()) == (
            200,
            model.generate("abc", max_new_tokens=9, seed=0).text,
        )
        await wrong.call()
        assert (wrong.status, "200" in wrong.content.decode()) == (400, True)
        gate = Gate()
        running = [engine.submit("a", max_new_tokens=9, stopping_criteria=gate)]
        running += [engine.submit("a", max_new_tokens=9) for _ in range(39)]
        await refused.call()
        assert (refused.status, "room for only 40" in refused.content.decode()) == (503, True)
        gate.opened.set()

    model.defaults["temperature"] = 0.0  # the same text whatever the seed
    asyncio.run(use_app(app, use))


def test_a_client_that_disconnects_cancels_its_request(run: Callable[[str], tuple[dict[str, Any], str]]) -> None:
    names, _ = run("An HTTP server")
    app = names["app"]

    async def use(engine: Engine) -> None:
        client = Client(app, "abc", max_new_tokens=90)
        joined, held = Gate(), Gate(after=40)
        beside = engine.submit("a", max_new_tokens=90, ignore_eos=True, stopping_criteria=[joined, outlast_hold, held])
        await until_async(joined.reached.is_set)
        task = asyncio.create_task(client.call())
        await until_async(engine._worker._inbox.qsize)
        joined.opened.set()
        await asyncio.wait_for(client.sent.wait(), HANG)
        client.gone.set()
        await asyncio.wait_for(task, HANG)
        await until_async(lambda: engine._worker._inbox.qsize() or engine.stats().in_use == 1)
        held.opened.set()
        await until_async(lambda: beside.done)
        assert client.status == 200
        assert engine.stats().new_tokens <= 90 + 42

    asyncio.run(use_app(app, use))

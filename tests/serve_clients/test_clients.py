"""Clients of other projects call `topw serve`, from an environment without this package.

`make clients` makes that environment. `make peers-serve` adds guidellm, which needs torch, and runs these tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import HOT, RENDERED, TEMPLATE, UNLIMITED, export_caller
from tests.support.shared import skip_or_fail
from tests.support.toy_model import Toy, byte_tokenizer, export
from tests.support.waiting import HANG
from topw_deploy.runtime import TopWModel

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"
BOOK = "http://books.invalid/one.txt"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not (ENVIRONMENT / "ready.stamp").exists():
        skip_or_fail(f"{ENVIRONMENT.name} is missing: `make clients` makes it")


@dataclass(frozen=True)
class Served:
    """A running server.

    address: URL of the API.
    folders: exported folders by the name of the model.
    """

    address: str
    folders: Mapping[str, Path]
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def served(installed: None, demo_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the bundled model, a chat model, and a model that calls a tool."""
    place = tmp_path_factory.mktemp("clients")
    chat = export(place / "toy", Toy.random(3), form="grouped", chat_template=TEMPLATE)
    folders = {"demo": demo_export, "toy": chat, "caller": export_caller(place / "caller")}
    words = [sys.executable, "-m", "topw_deploy", "serve", *map(str, folders.values())]
    names = [word for name in folders for word in ("--served-model-name", name)]
    limits = [word for name, seconds in UNLIMITED.items() for word in (f"--{name.replace('_', '-')}", str(seconds))]
    with subprocess.Popen(
        [*words, *names, *limits, "--port", "0", "--provider", "cpu", "--threads", "1", "--api-key", "sk-test"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        address, opened = None, 0
        while opened < len(folders):
            line = process.stderr.readline()
            assert line, "the server ended"
            event = json.loads(line)
            address = event.get("address", address)
            opened += event["event"] == "opened"
        yield Served(f"{address}/v1", folders, process)
        process.terminate()


def client(words: list[str], home: Path, **variables: str) -> str:
    """Run a program of the clients' environment. Returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", **variables}
    program = str(ENVIRONMENT / "bin" / words[0])
    done = subprocess.run([program, *words[1:]], env=environment, capture_output=True, text=True, timeout=10 * HANG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def answers(name: str, served: Served, home: Path) -> dict[str, Any]:
    """The answers that call_NAME.py received."""
    printed = client(["python", str(HERE / f"call_{name}.py"), served.address], home)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@pytest.fixture
def guidellm() -> None:
    """Also in CI, only `make peers-serve` installs torch a second time."""
    if not (ENVIRONMENT / "guidellm.stamp").exists():
        pytest.skip("guidellm is missing: `make peers-serve` installs it and runs these tests")


@pytest.fixture(scope="module")
def chat_text(served: Served) -> str:
    with TopWModel.from_pretrained(served.folders["toy"], provider="cpu") as model:
        return model.generate(RENDERED, add_special_tokens=False, max_new_tokens=8, seed=5, **HOT).text


def test_openais_client_gets_answers_streams_calls_and_typed_errors(
    served: Served, chat_text: str, tmp_path: Path
) -> None:
    found = answers("openai", served, tmp_path)
    assert found["models"] == sorted(served.folders)
    assert found["chat"] == found["stream"] == found["async_stream"] == chat_text
    assert found["async"] == [chat_text] * 4
    assert (found["usage"], found["stream_usage"]) == ([7, 8, 15], 8)
    assert found["call"] == ["tool_calls", '{"n": 1}']
    assert found["streamed_call"] == ["f", '{"n": 1}']
    assert {"content.delta", "tool_calls.function.arguments.done"} <= set(found["streamed_kinds"])
    assert json.loads(found["async_call"]) == {"n": 1}
    assert found["structured"] == found["async_structured"] == found["parsed_response"] == 1
    assert found["text"] == found["text_stream"] != ""
    assert found["response_stream"] == [found["response"]] * 2
    assert found["response_ending"] == "response.incomplete"  # for want of length, as OpenAI's own server says
    assert found["unknown_model"][:3] == ["NotFoundError", 404, "model_not_found"]
    assert found["unknown_field"] == ["BadRequestError", 400, "unknown_parameter", "tempreature"]
    assert found["too_long"][:3] == ["BadRequestError", 400, "context_length_exceeded"]
    assert found["wrong_key"][:3] == ["AuthenticationError", 401, "invalid_api_key"]


def test_litellm_gets_answers_streams_calls_and_typed_errors(served: Served, chat_text: str, tmp_path: Path) -> None:
    found = answers("litellm", served, tmp_path)
    assert found["chat"] == found["stream"] == found["async"] == chat_text
    assert (found["usage"], found["stream_usage"]) == ([7, 8, 15], 8)
    assert found["call"] == ["tool_calls", '{"n": 1}']
    assert json.loads(found["streamed_call"]) == {"n": 1}
    assert json.loads(found["structured"]) == {"a": 1}
    assert found["text"] == found["text_stream"] != ""
    assert found["response"] == 16  # the least that litellm sends
    assert found["unknown_model"] == ["NotFoundError", 404]
    assert found["unknown_field"] == ["BadRequestError", 400]
    assert found["too_long"] == ["ContextWindowExceededError", 400]
    assert found["no_tools"][1] == 422


def test_langchain_gets_answers_streams_and_calls(served: Served, chat_text: str, tmp_path: Path) -> None:
    found = answers("langchain", served, tmp_path)
    assert found["chat"] == found["stream"] == found["async"] == chat_text
    assert (found["usage"], found["stream_usage"]) == ([7, 8, 15], 8)
    assert found["call"] == ["tool_calls", "f", {"n": 1}]
    assert found["streamed_call"] == ["f", {"n": 1}]
    assert found["structured"] == found["forced"] == 1
    assert found["text"] == found["text_stream"] == found["texts"][0][0] != found["texts"][1][0]
    assert found["talk"] > 7
    assert found["response"] == 8


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The chat model's tokenizer in transformers' form."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")
    return folder


def test_llama_benchy_measures_the_server(served: Served, tokenizer: Path, tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    (cache / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt").write_text("A short book of a few words. " * 50, "utf-8")
    report = tmp_path / "report.json"
    model = ["--model", "toy", "--tokenizer", str(tokenizer), "--api-key", "sk-test", "--book-url", BOOK]
    sizes = ["--pp", "24", "--tg", "8", "--runs", "2", "--concurrency", "1", "4", "--skip-coherence"]
    # By default it subtracts a measured latency, and leaves out requests that took no longer than that.
    sizes += ["--latency-mode", "none"]
    saved = ["--save-result", str(report), "--format", "json"]
    printed = client(["llama-benchy", "--base-url", served.address, *model, *sizes, *saved], tmp_path)
    assert "rror" not in printed, printed
    found = json.loads(report.read_text("utf-8"))
    assert [each["concurrency"] for each in found["benchmarks"]] == [1, 4]
    assert all(each["peak_throughput"]["mean"] > 0 for each in found["benchmarks"])
    assert [len(each["pp_throughput"]["values"]) for each in found["benchmarks"]] == [2, 2]
    shutil.rmtree(cache)


@pytest.mark.parametrize(("path", "name"), [("/v1/chat/completions", "toy"), ("/v1/completions", "demo")])
def test_guidellm_measures_the_server_without_an_error(
    guidellm: None, served: Served, tokenizer: Path, tmp_path: Path, path: str, name: str
) -> None:
    report = tmp_path / "report.json"
    server = {"target": served.address.removesuffix("/v1"), "api_key": "sk-test", "request_format": path}
    options: dict[str, dict[str, Any]] = {
        "backend": {"kind": "openai_http", "model": name, **server},
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer if name == "toy" else served.folders[name])},
        "data": {"kind": "synthetic_text", "prompt_tokens": 24, "output_tokens": 8},
        "profile": {"kind": "concurrent", "streams": 4},
        "constraint": {"kind": "max_requests", "count": 40},
        "output": {"kind": "json", "path": str(report)},
    }
    words = [word for option, value in options.items() for word in (f"--{option}", json.dumps(value))]
    client(["guidellm", "run", "--disable-console-interactive", *words], tmp_path)
    metrics = json.loads(report.read_text("utf-8"))["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": 40, "errored": 0, "incomplete": 0, "total": 40}
    drawn = metrics["output_token_count"]["successful"]
    assert (drawn["min"], drawn["max"], drawn["count"]) == (8, 8, 40)
    if name == "toy":  # its template adds five tokens of a byte each
        read = metrics["prompt_token_count"]["successful"]
        assert (read["min"], read["max"]) == (29, 29)

"""Options of `topw serve`."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from topw_deploy.cli.main import run, topw
from topw_deploy.errors import ParameterError
from topw_deploy.serve.server import open_socket


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command runs."""
    found: dict[str, Any] = {}

    def record(options: Any, **others: Any) -> None:
        found.update(others, options=options)

    monkeypatch.setattr("topw_deploy.serve.server.run", record)
    return found


def serve(*words: str) -> int:
    return run(topw, "topw", "TOPW", ["serve", *words])


def test_flags_become_options(called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPW_SERVE_API_KEY", "one two")
    words = "--no-page --max-body 1MiB --kv-bytes 2GiB --threads 1 --port 0 --max-batch 3"
    assert serve(str(tmp_path / "a"), str(tmp_path / "b"), *words.split()) == 0
    options = called["options"]
    assert list(options.models) == ["a", "b"]
    assert options.api_keys == ("one", "two")
    assert options.max_body == 2**20
    assert not options.page
    assert options.engine["kv_bytes"] == 2**31
    assert options.engine["max_batch"] == 3
    assert "max_length" not in options.engine
    assert options.opening["intra_op_num_threads"] == 1
    assert (called["host"], called["port"], called["json_logs"]) == ("127.0.0.1", 0, True)


def test_a_file_has_the_options_that_are_not_given(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax_batch = 4\nmax-body = "1MB"\napi-key = "whole"\npage = false\nhost = "::1"\n')
    monkeypatch.setenv("TOPW_SERVE_HOST", "::2")
    assert serve("a", "--config", str(file), "--port", "0") == 0
    options = called["options"]
    assert (called["host"], called["port"], options.page) == ("::2", 0, False)
    assert (options.engine["max_batch"], options.max_body, options.api_keys) == (4, 1_000_000, ("whole",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-bach = 4", "has the unknown option 'max-bach': did you mean max-batch? known are allow-fallback, "),
        ("port = ", "serve.toml cannot be read: "),
        ('port = "a"', "'a' is not a valid integer"),
        ("request-timeout = 0", "--request-timeout is 0.0, but must be a finite number of seconds > 0"),
    ],
)
def test_a_wrong_file_is_a_usage_error(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "serve.toml").write_text(text)
    assert serve("a", "--config", str(tmp_path / "serve.toml")) == 2
    assert message in capsys.readouterr().err
    assert not called


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--served-model-name", "x", "--served-model-name", "y"], "2 times for 1 model."),
        (["x/a", "y/a"], "two models are named 'a'"),
        (["a", "--max-body", "many"], "--max-body"),
        (["a", "--request-timeout", "0"], "--request-timeout"),
        (["a", "--tool-parser", "none"], "--tool-parser"),
    ],
)
def test_wrong_options_are_usage_errors_that_name_them(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert serve(*words) == 2
    assert message in capsys.readouterr().err
    assert not called


def test_a_port_in_use_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert serve(str(tmp_path), "--port", port) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.fixture
def uds() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="topw") as place:  # short: a socket's path has at most 107 characters
        yield Path(place) / "s"


def test_the_socket_of_a_killed_server_is_replaced(uds: Path) -> None:
    left, _ = open_socket("", 0, uds)
    left.close()  # like a kill, it leaves the file
    assert uds.exists()
    listener, _ = open_socket("", 0, uds)
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(uds))
        listener.accept()[0].close()


@pytest.mark.parametrize("backlog", [2048, 0])
def test_the_socket_of_a_running_server_is_not_taken(uds: Path, backlog: int) -> None:
    listener, _ = open_socket("", 0, uds)
    with listener, contextlib.ExitStack() as waiting:
        listener.listen(backlog)
        if not backlog:  # so busy that it takes no more connections
            waiting.enter_context(socket.socket(socket.AF_UNIX)).connect(str(uds))
        with pytest.raises(ParameterError, match="another process listens at") as caught:
            open_socket("", 0, uds)
        assert caught.value.parameters == ("uds",)
        assert uds.exists()


def test_a_socket_of_another_kind_and_a_file_are_not_replaced(uds: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(uds))
        with pytest.raises(ParameterError, match="cannot listen"):
            open_socket("", 0, uds)
    uds.unlink()
    uds.write_text("a file")
    with pytest.raises(ParameterError, match="cannot listen"):
        open_socket("", 0, uds)
    assert uds.read_text() == "a file"

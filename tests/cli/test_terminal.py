"""What commands print is escaped, and only one module prints."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import topw_deploy.cli
from tests.support.invoking import Invoke
from tests.support.toy_model import EOS, Toy, byte_ids, export
from tests.support.waiting import until
from topw_deploy.cli import terminal
from topw_deploy.manifest import load_decoder_manifest, save_manifest
from topw_deploy.text import printable

from .conftest import ANSWER, PROGRAM, Program

COMMANDS = sorted(Path(topw_deploy.cli.__file__).parent.glob("*.py"))
EVIL = "\x1b]0;owned\x07\x9b2J\u202e"
SHOWN = r"\x1b]0;owned\x07\x9b2J\u202e"
PRINTS = {"print", "click.echo", "click.secho", "click.echo_via_pager", "sys.stdout.write", "sys.stderr.write"}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_only_the_terminal_module_prints(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    found = {ast.unparse(call.func) for call in calls} & PRINTS
    assert found == ({"sys.stdout.write", "sys.stderr.write"} if path.stem == "terminal" else set())


@pytest.fixture
def hostile(random_model: Path, tmp_path: Path) -> Path:
    """Manifest and name contain terminal controls."""
    folder = tmp_path / f"out{EVIL}"
    shutil.copytree(random_model, folder)
    manifest = load_decoder_manifest(folder)
    decoder = replace(manifest.decoder, model_type=f"toy\n{EVIL}")
    save_manifest(folder, replace(manifest, decoder=decoder, source={**manifest.source, "id": EVIL}))
    return folder


@pytest.mark.parametrize("words", [("inspect",), ("verify", "--hashes-only"), ("generate", "--stats")])
def test_names_from_a_folder_are_printed_escaped(invoke: Invoke, hostile: Path, words: tuple[str, ...]) -> None:
    prompt = ("x", "--max-new-tokens", 2, "--seed", 1, "--no-stream") if words[0] == "generate" else ()
    result = invoke(words[0], hostile, *prompt, *words[1:])
    printed = result.stderr if words[0] == "generate" else result.output
    assert printable(printed, keep="\n") == printed
    if words[0] in ("inspect", "verify"):
        assert SHOWN in printed
    if words[0] == "inspect":
        assert f"toy\\n{SHOWN}" in printed


def test_json_of_a_folder_with_control_characters_is_exact_and_escaped(invoke: Invoke, hostile: Path) -> None:
    printed = invoke("inspect", hostile, "--json").stdout
    assert printable(printed, keep="\n") == printed
    assert json.loads(printed)["source"]["id"] == EVIL


def test_an_error_and_a_note_about_a_name_are_one_escaped_line(program: Program, tmp_path: Path) -> None:
    done = program("generate", f"{EVIL}\nError: all is well", "x")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{SHOWN}\\nError" in done.stderr
    folder = export(tmp_path / "out", Toy.random(0), generation_config={"top_p": 0.9, f"x{EVIL}": EVIL})
    done = program("generate", folder, "x", "--max-new-tokens", "1")
    assert done.stderr.startswith("Note: generation_config.json sets ")
    assert printable(done.stderr, keep="\n") == done.stderr


@pytest.mark.slow
def test_progress_about_a_model_id_is_escaped(program: Program, tmp_path: Path) -> None:
    done = program("export", f"a/{EVIL}", tmp_path / "out")
    assert done.stderr.startswith(f"Finding a/{SHOWN}\nError: a/{SHOWN} does not exist")


def test_usage_errors_are_escaped(program: Program) -> None:
    done = program(EVIL)
    assert (done.returncode, "Usage: topw" in done.stderr, "\x1b" in done.stderr) == (2, True, False)


class Terminal(io.StringIO):
    """A stream that may be a terminal."""

    encoding = "utf-8"
    is_terminal = True

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["a\tb\nc"], "a\tb\nc\n"),
        (["\x1b[2", "Jx\x9b"], "\\x1b[2Jx\\x9b\n"),
        (["one\r\ntwo\r\n"], "one\ntwo\n\n"),
        (["hidden\rshown", "\r"], "hidden\\rshown\\r\n"),  # a lone CR would overwrite the line
        (["שלום 👩‍👩‍👧 é"], "שלום 👩‍👩‍👧 é\n"),
    ],
)
def test_generated_text_does_not_control_a_terminal(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], shown: str
) -> None:
    for is_terminal in (True, False):
        out = Terminal(newline="")
        out.is_terminal = is_terminal
        monkeypatch.setattr(sys, "stdout", out)
        for piece in (*pieces, "\n"):
            terminal.write_generated(piece)
        assert out.getvalue() == (shown if is_terminal else "".join(pieces) + "\n")


def new_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr, on which the line of what runs appears at once."""
    monkeypatch.setattr(terminal, "QUIET", 0.0)
    monkeypatch.setattr(terminal, "_TICK", 0.01)
    stream = Terminal(newline="")
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_terminal_says_what_runs_while_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = new_stderr(monkeypatch)
    with terminal.waiting("Generating"), terminal.bar(5, "prompts", done=2) as advance:
        advance(2)
        until(lambda: "\rGenerating: 4 of 5 prompts, 0 s\x1b[K" in shown.getvalue())
        terminal.tell("a note")
    assert "\x1b[K\r\x1b[Ka note\n" in shown.getvalue()  # the note replaces the line
    assert shown.getvalue().endswith(("\r\x1b[K", "note\n"))  # nothing is left


def test_a_pipe_gets_only_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = new_stderr(monkeypatch)
    shown.is_terminal = False
    with terminal.waiting("Generating"), terminal.bar(5, "prompts"):
        terminal.tell("a note")
    assert shown.getvalue() == "a note\n"


def test_generated_text_in_a_pipe_is_what_the_model_wrote(program: Program, tmp_path: Path) -> None:
    answer = "\x1b[31mred\x1b[0m\rx\x9b2J"
    folder = export(tmp_path / "out", Toy.script([*byte_ids(answer), EOS], prompt_tokens=1))
    for option in ("--stream", "--no-stream"):
        assert program("generate", folder, "x", option).stdout == f"{answer}\n"
    printed = program("generate", folder, "x", "--json").stdout
    assert printable(printed, keep="\n") == printed
    assert json.loads(printed)["text"] == answer


@pytest.mark.slow
def test_json_loses_no_character_where_stdout_takes_ascii_only(scripted: Path) -> None:
    words = [*PROGRAM, "generate", str(scripted), "x", "--json"]
    done = subprocess.run(words, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert json.loads(done.stdout)["text"] == ANSWER


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
@pytest.mark.slow
def test_a_closed_stderr_gives_its_number_to_no_other_file(scripted: Path) -> None:
    code = (
        "import os, sys; from topw_deploy.cli import terminal; terminal.prepare_streams(); print(os.fstat(2).st_rdev)"
    )
    null = str(os.stat(os.devnull).st_rdev)
    words = [sys.executable, "-c", code]
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *words], capture_output=True, text=True)
    assert done.stdout == f"{null}\n"
    words = [*PROGRAM, "generate", str(scripted), "x", "--stats"]
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")

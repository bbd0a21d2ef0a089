"""Exit codes and messages of the program."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.support.toy_model import Toy, export
from tests.support.waiting import HANG
from topw_deploy import install
from topw_deploy.cli import main

from .conftest import PROGRAM, Program


@pytest.mark.slow
def test_a_character_that_stdout_cannot_encode_is_replaced(scripted: Path) -> None:
    words = [*PROGRAM, "generate", str(scripted), "x"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout) == (0, "hello ? world.\n")


def test_a_failure_is_1_and_one_sentence_on_stderr(program: Program, tmp_path: Path) -> None:
    for command in ("generate", "inspect"):
        done = program(command, tmp_path / "none", *(["x"] if command == "generate" else []))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1


def test_help_lists_every_command_and_is_0(program: Program) -> None:
    done = program("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in main.COMMANDS)
    assert "Usage: topw-export" in program("--help", export=True).stdout
    assert program("--version").stdout.startswith("topw ")


@pytest.mark.parametrize(
    ("words", "place", "completed"), [("topw gen", 1, "generate"), ("topw serve --max-ba", 2, "--max-batch")]
)
def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, place: int, completed: str
) -> None:
    for name, value in {"COMP_WORDS": words, "COMP_CWORD": str(place), "_TOPW_COMPLETE": "bash_complete"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main.run(main.topw, "topw", "TOPW", [])
    assert capsys.readouterr().out == f"plain,{completed}\n"


def test_both_spellings_of_the_exporter_read_the_same_variables(program: Program) -> None:
    for is_own, words in ((False, ("export", "tiny", "out")), (True, ("tiny", "out"))):
        done = program(*words, export=is_own, TOPW_EXPORT_METRIC="nonsense")
        assert done.returncode == 2
        assert "nonsense" in done.stderr


def test_a_missing_extra_names_the_command_that_installs_it(scripted: Path) -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from topw_deploy.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "generate", scripted, "x"], capture_output=True, text=True)
    assert done.returncode == 1
    needs = "running a model needs onnxruntime, which is not installed ([cpu] brings it, or [gpu] for NVIDIA GPUs"
    assert done.stderr == f"Error: {needs}, never both); run: {install.install_command('cpu')}\n"


def test_a_missing_package_of_any_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_package(module: str) -> int:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(install, "is_importable", lambda _module: False)
    for extra, packages in install.MODULES.items():
        module = next(iter(packages.values()))
        failing = click.Command("failing", callback=lambda module=module: import_package(module))
        assert main.run(failing, "topw", "TOPW", []) == 1
        assert f"[{extra}]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [(("export", "tiny", "out"), "exporting"), (("export-sampler", "tiny", "out"), "exporting"),
     (("stats", "out", "x"), "`topw stats`")],
)  # fmt: skip
def test_a_command_without_its_extra_names_all_that_is_missing(
    program: Program, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], what: str
) -> None:
    real = install.is_importable
    monkeypatch.setattr(install, "is_importable", lambda name: name not in ("torch", "onnx_ir") and real(name))
    done = program(*words)
    needs = f"{what} needs torch and onnx-ir, which are not installed; run: {install.install_command('export')}"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"Error: {needs}\n")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slow model: a chat over a pipe never ends by itself."""
    return export(tmp_path_factory.mktemp("endless") / "out", Toy.random(0), chat_template="{{ messages[0].content }}")


def chatting(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*PROGRAM, "chat", str(folder), *words], stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.mark.slow
def test_interruption_is_130_and_leaves_no_traceback(endless: Path) -> None:
    process = chatting(endless)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)  # while it answers, or waits for the next line
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
def test_a_closed_pipe_ends_quietly(random_model: Path) -> None:
    process = chatting(random_model, "--seed", "1", "--max-new-tokens", "4")
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(b"a\n" * 50, timeout=HANG)
    assert (process.returncode, errors) == (1, b"")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the streams")
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("x <&-", 0, ""),
        ("<&-", 2, "standard input is closed"),
        ("- <&-", 2, "standard input is closed"),
        ("x >&-", 1, "Error: standard output is closed; redirect it to a file or to the null device."),
        ("x --json >&-", 1, "Error: standard output is closed"),
        ("--help >&-", 1, "Error: standard output is closed"),
        ("x 1</dev/null", 1, "Error: the output cannot be written: Bad file descriptor"),
        ("x --json >/dev/full", 1, "Error: the output cannot be written: No space left on device"),
    ],
)
def test_a_closed_or_full_stream_is_reported_in_one_sentence(
    scripted: Path, redirection: str, code: int, message: str
) -> None:
    if "/dev/full" in redirection and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    words = f'"{sys.executable}" -m topw_deploy generate "{scripted}" {redirection}'
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


SCRIPT = Path(__file__).parents[2] / "docs" / "guide" / "commands.py"


def test_the_page_of_commands_is_the_commands_own_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    spec = importlib.util.spec_from_file_location("docs_commands", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    commands = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(commands)
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), "run: python docs/guide/commands.py"

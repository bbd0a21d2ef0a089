"""The verification process' lines, and what becomes of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from topw_deploy.errors import VerificationError
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.verification import run as in_subprocess
from topw_deploy.export.verification import worker
from topw_deploy.export.verification.run import LEFT_PADDED, Result, format_result, record_of
from topw_deploy.manifest import Check, NotCompared, Verification
from topw_deploy.progress import SILENT, Progress

GOOD = Check("prefill logits", True, 1e-7, 1e-4, "64 tokens")


def verify(onnx: Path | None) -> tuple[Verification, bool, int]:
    source = Source("id", "local", Path("model"), Path("model"), onnx)
    return in_subprocess.verify_in_subprocess(source, ExportOptions(), Path("out"), SILENT)


@pytest.mark.parametrize("difference", [3.0, float("inf"), float("nan")])
def test_padding_that_fails_is_recorded_with_its_limit_for_another_exporters_decoder(
    difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Check(LEFT_PADDED, False, difference, 1e-4, "lengths [64, 32, 7, 1]")
    monkeypatch.setattr(in_subprocess, "run_checks", lambda *_rest: (record_of([GOOD, failed]), 5))
    verification, may_pad, peak = verify(Path("model.onnx"))
    assert (verification.status, may_pad, peak) == ("partial", False, 5)
    good, recorded = verification.checks
    assert good == GOOD
    assert (recorded.name, recorded.passed) == (LEFT_PADDED, False)
    assert recorded.detail == "lengths [64, 32, 7, 1]; so the prompts of a batch must have equal lengths"
    json.dumps(msgspec.to_builtins(verification), allow_nan=False)  # a manifest holds finite numbers


def test_padding_that_fails_ends_the_export_of_our_own_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Check(LEFT_PADDED, False, 3.0, 1e-4, "lengths [64, 32, 7, 1]")
    monkeypatch.setattr(in_subprocess, "run_checks", lambda *_rest: (record_of([GOOD, failed]), 5))
    with pytest.raises(VerificationError, match=r"1 of 2 checks failed \(first: left-padded batch logits"):
        verify(None)


def test_another_failure_beside_padding_ends_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = (Check("prefill logits", False, 3.0, 1e-4), Check(LEFT_PADDED, False, 3.0, 1e-4))
    monkeypatch.setattr(in_subprocess, "run_checks", lambda *_rest: (record_of(failed), 5))
    with pytest.raises(VerificationError, match="2 of 2 checks failed"):
        verify(Path("model.onnx"))


WAITS = """
import runpy, sys, time
from topw_deploy import manifest
def wait(folder):
    (folder / "made").touch()
    try:
        print(sys.argv[2], file=sys.__stdout__, flush=True)
        time.sleep(600)
    finally:
        (folder / "made").unlink()
manifest.load_decoder_manifest = wait
runpy.run_module("topw_deploy.export.verification.worker", run_name="__main__")
"""


@pytest.mark.slow
def test_an_interruption_lets_the_worker_remove_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = format_result(NotCompared("decoder logits", "a reason"))

    def start(task: str, errors: IO[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WAITS, task, line]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def interrupted(said: str) -> None:
        assert (tmp_path / "made").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(in_subprocess, "start", start)
    monkeypatch.setattr(in_subprocess, "_TERMINATION_SECONDS", 60.0)
    with pytest.raises(KeyboardInterrupt):
        in_subprocess.run_checks({"folder": str(tmp_path)}, Progress(interrupted))
    assert not list(tmp_path.iterdir())


def test_what_a_models_own_code_prints_is_not_taken_for_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = NotCompared("decoder logits", "a reason")

    def run(_task: dict[str, Any]) -> Iterator[Result]:
        sys.stdout.write("The attention mask was not set.\n")
        yield result

    monkeypatch.setattr(worker, "run", run)
    assert worker.main("{}") == 0
    printed = capsys.readouterr()
    first, last = printed.out.splitlines()
    assert first == format_result(result)
    answer = json.loads(last)
    assert msgspec.convert(answer["verification"], Verification) == record_of([result])
    assert answer["peak"] > 0
    assert printed.err == "The attention mask was not set.\n"

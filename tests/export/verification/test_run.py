"""Results of a verification: counted, printed, measured, and brought from the process that makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pytest

from tests.support.toy_model import VOCAB, Toy, byte_tokenizer, export
from tests.support.warm_process import start_new
from topw_deploy.errors import VerificationError
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.source.resolve import Source
from topw_deploy.export.verification import run as in_subprocess
from topw_deploy.export.verification import worker
from topw_deploy.export.verification.quantised import page_ends
from topw_deploy.export.verification.run import LEFT_PADDED, PairDistance, Result, format_result, record_of
from topw_deploy.manifest import Check, NotCompared, Note, Verification, load_decoder_manifest
from topw_deploy.progress import SILENT, Progress
from topw_deploy.sampling import Geometry, TopWOptions, median_distance

GOOD = Check("prefill", True, 1e-7, 1e-4, "torch")


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


@pytest.mark.parametrize(
    ("beside", "onnx", "message"),
    [
        (GOOD, None, r"1 of 2 checks failed \(first: left-padded batch logits"),
        (Check("prefill logits", False, 3.0, 1e-4), Path("model.onnx"), "2 of 2 checks failed"),
    ],
)
def test_padding_that_fails_ends_the_export_of_our_own_decoder_and_beside_another_failure(
    beside: Check, onnx: Path | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Check(LEFT_PADDED, False, 3.0, 1e-4, "lengths [64, 32, 7, 1]")
    monkeypatch.setattr(in_subprocess, "run_checks", lambda *_rest: (record_of([beside, failed]), 5))
    with pytest.raises(VerificationError, match=message):
        verify(onnx)


BAD = Check("decode", False, 1.0, 1e-4, "4 steps")
MISSING, NOTE = NotCompared("generation", "the source is not available"), Note("kept sets", "24 of 32 equal")


@pytest.mark.parametrize(
    ("results", "status"),
    [([GOOD], "passed"), ([GOOD, NOTE], "passed"), ([GOOD, MISSING], "partial"), ([GOOD, BAD], "partial")],
)
def test_only_what_was_compared_and_passed_counts_as_passed(results: list[Result], status: str) -> None:
    verification = record_of(results)
    assert verification.status == status
    assert [*verification.checks, *verification.not_compared, *verification.notes] == results


WAITS = """
import runpy, sys, time
from topw_deploy import manifest
def wait(folder, unfinished):
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


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_the_verification_do_not_spin_unless_the_user_wants_it(
    set_by_user: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_by_user)
    started: dict[str, Any] = {}
    monkeypatch.setattr(in_subprocess.subprocess, "Popen", lambda _command, **options: started.update(options))
    start_new("{}", sys.stderr)
    assert started["env"]["OMP_WAIT_POLICY"] == expected


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


TOY = Toy.random(1, options=TopWOptions(top_m=64, metric="mahalanobis"))


class Bigrams:
    """A reference whose logits depend on the last token alone."""

    name = "bigrams"

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return TOY.follow[ids].astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("toy") / "out", TOY, tokenizer=byte_tokenizer(bos=True))


def test_the_median_is_of_the_references_logits_on_that_text_and_reaches_the_manifest(folder: Path) -> None:
    manifest = load_decoder_manifest(folder)
    geometry = Geometry.from_embeddings(TOY.embeddings, "mahalanobis")
    (found,) = worker._measure_pair_distance(folder, manifest, Bigrams(), geometry)  # type: ignore[arg-type]
    rows = [row for ids in page_ends(folder, manifest, 64) for row in Bigrams().logits(ids)]
    assert len(rows) == 128
    assert found.median == median_distance(geometry, rows)
    assert 0 < found.median < geometry.distances(np.arange(VOCAB), np.arange(VOCAB)).max()
    assert record_of([found]).median_distance == found.median
    assert format_result(PairDistance(21.3456)) == "  -[i] median distance of likely pairs: 21.35"

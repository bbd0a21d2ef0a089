"""Run the verification worker for exports and `topw verify`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from topw_deploy.errors import SourceError, VerificationError
from topw_deploy.export.job import Job
from topw_deploy.export.source.resolve import HubOptions, resolve
from topw_deploy.export.verification.results import LEFT_PADDED, RIGHT_PADDED, Outcome, Result, decoded_result, printed
from topw_deploy.manifest import Check, DecoderManifest, Manifest, NotCompared, Verification
from topw_deploy.progress import Progress

_ENDING = 5.0  # seconds
_EQUAL_LENGTHS = "so the prompts of a batch must have equal lengths"


def verify_in_subprocess(job: Job, folder: Path) -> tuple[Verification, bool]:
    """Verify a new export. Returns (manifest record, whether batches may be padded).

    Another exporter's decoder may fail the padding checks; the manifest records that. Raises VerificationError for the
    first failure otherwise.
    """
    source = job.source
    task = {
        "folder": str(folder),
        "onnx": str(source.onnx) if source.onnx else None,
        "checkpoint": None if source.onnx else str(source.folder),
        "num_hidden_layers": job.request.graph.num_hidden_layers,
        "trust_remote_code": job.request.hub.trust_remote_code,
        "measure": True,
    }
    outcome = run_checks(task, job.progress)
    job.memory.peaks["verification"] = outcome.peak
    failed = [check.name for check in outcome.failed]
    if source.onnx is not None and failed in ([LEFT_PADDED], [RIGHT_PADDED]):
        return replace(outcome, checks=tuple(map(_limited, outcome.checks))).verification(), False
    if outcome.failed:
        worst = outcome.failed[0]
        raise VerificationError(
            f"{len(outcome.failed)} of {len(outcome.checks)} checks failed (first: {worst.name}, difference "
            f"{worst.difference:.3g}, bound {worst.bound:.3g}); nothing was kept, --keep-failed keeps the files."
        )
    return outcome.verification(), True


def _limited(check: Check) -> Check:
    """Add the consequence to a failed padding check, and make its difference finite, as the manifest requires."""
    if check.passed:
        return check
    difference = min(check.difference, sys.float_info.max) if check.difference >= 0 else sys.float_info.max  # NaN
    return replace(check, difference=difference, detail=f"{check.detail}; {_EQUAL_LENGTHS}")


def recheck(
    folder: Path, manifest: Manifest, named: str | None, trust_remote_code: bool, progress: Progress
) -> Outcome:
    """Check a finished export against source `named`, default the manifest's.

    Downloads nothing: hub models must be cached. Does not compare sampler-only folders.
    """
    if not isinstance(manifest, DecoderManifest):
        reason = "this is a sampler-only model"
        return Outcome((), (NotCompared("decoder logits", reason), NotCompared("generation", reason)))
    task: dict[str, Any] = {"folder": str(folder), "trust_remote_code": trust_remote_code, "native": True}
    try:
        revision = None if named or manifest.source.get("revision") == "local" else manifest.source.get("revision")
        source = resolve(named or manifest.source["id"], HubOptions(revision=revision, local_files_only=True))
    except SourceError as error:
        task["no_reference"] = f"the source is not available ({error})"
    else:
        if source.onnx is not None:
            task["onnx"] = str(source.onnx)
        else:
            task |= {"checkpoint": str(source.folder), "num_hidden_layers": manifest.decoder.num_layers}
    return run_checks(task, progress)


def run_checks(task: dict[str, Any], progress: Progress) -> Outcome:
    """Run the worker on `task`, reporting results as they arrive.

    Keys of `task`:
        folder: the export.
        onnx or checkpoint: the source; without one, `no_reference` says why.
        num_hidden_layers, trust_remote_code: checkpoint options.
        native: also check this machine's native sampler.
        measure: also measure the median distance of likely pairs.
    Raises VerificationError if the worker fails.
    """
    results: list[Result] = []
    error, peak = None, 0
    for line in _lines(task):
        result = decoded_result(line)
        if result is not None:
            results.append(result)
            progress.say(printed(result))
        elif "peak" in line:
            peak = int(line["peak"])
        else:
            error = line["error"]
    outcome = Outcome.of(results, peak)
    if error is not None:
        failed = [check.name for check in outcome.failed]
        after = f" after these checks had failed: {', '.join(failed)}" if failed else ""
        raise VerificationError(f"verification stopped{after}: {error}")
    return outcome


def _lines(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's lines of JSON. Raises VerificationError if it dies."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as last_words:
        process = start(json.dumps(task), last_words)
        try:
            assert process.stdout is not None
            reported = False
            for text in process.stdout:
                line = json.loads(text)
                reported = reported or "error" in line
                yield line
            if process.wait() != 0 and not reported:
                last_words.seek(0)
                words = last_words.read().strip().splitlines() or ["no message"]
                raise VerificationError(
                    f"the verification ended with exit code {process.returncode} ({words[-1][:300]}); "
                    "report this, or export with --no-verify."
                )
        finally:
            if process.poll() is None:
                _end(process)
            process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    """Let the worker remove its temporary files, which may be as large as the model."""
    process.terminate()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()


def start(task: str, errors: IO[str]) -> subprocess.Popen[str]:
    """Start the worker on `task` (JSON) with a pipe for its output."""
    command = [sys.executable, "-m", "topw_deploy.export.verification.worker", task]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8")

"""The side of the verification that the exporter and `topw verify` see."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topw_deploy.errors import SourceError, VerificationError
from topw_deploy.export.job import Job
from topw_deploy.export.request import HubOptions
from topw_deploy.export.source.resolve import resolve
from topw_deploy.export.verification.names import LEFT_PADDED, RIGHT_PADDED
from topw_deploy.manifest import Check, DecoderManifest, Manifest, Verification
from topw_deploy.progress import Progress


@dataclass(frozen=True)
class VerifyOutcome:
    """Checks that ran, and (name, reason) of those that could not."""

    checks: tuple[Check, ...]
    skipped: tuple[tuple[str, str], ...]
    peak: int = 0  # bytes that checking took at most

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


def verify_in_subprocess(job: Job, folder: Path) -> tuple[Verification, bool]:
    """Verify the folder being exported; also says whether batches may be padded.

    Raises VerificationError naming the first check that fails. A decoder of another exporter may fail at padding
    alone: its rows then need equal lengths, which the manifest tells the runtime.
    """
    source = job.source
    task = {
        "folder": str(folder),
        "onnx": str(source.onnx) if source.onnx else None,
        "checkpoint": None if source.onnx else str(source.folder),
        "num_hidden_layers": job.request.graph.num_hidden_layers,
        "trust_remote_code": job.request.hub.trust_remote_code,
    }
    outcome = run_checks(task, job.progress)
    job.memory.peaks["verification"] = outcome.peak
    if source.onnx is not None and [check.name for check in outcome.failed] in ([LEFT_PADDED], [RIGHT_PADDED]):
        kept = tuple(check for check in outcome.checks if check.passed)
        return Verification(status="passed", checks=kept), False
    if outcome.failed:
        worst = outcome.failed[0]
        raise VerificationError(
            f"{len(outcome.failed)} of {len(outcome.checks)} checks failed (first: {worst.name}, difference "
            f"{worst.difference:.3g}, bound {worst.bound:.3g}); nothing was kept, --keep-failed keeps it to look at."
        )
    return Verification(status="partial" if outcome.skipped else "passed", checks=outcome.checks), True


def recheck(
    folder: Path, manifest: Manifest, named: str | None, trust_remote_code: bool, progress: Progress
) -> VerifyOutcome:
    """Check a finished export again, against the source that is `named` or that its manifest names.

    Nothing is downloaded: a hub model is used if it lies in the cache. A sampler-only folder has no decoder to compare.
    """
    if not isinstance(manifest, DecoderManifest):
        reason = "this is a sampler-only model"
        return VerifyOutcome((), (("decoder logits", reason), ("generation", reason)))
    task: dict[str, Any] = {"folder": str(folder), "trust_remote_code": trust_remote_code, "native": True}
    try:
        revision = None if named or manifest.source.get("revision") == "local" else manifest.source.get("revision")
        source = resolve(named or manifest.source["id"], HubOptions(revision=revision, local_files_only=True))
    except SourceError as error:
        task["no_reference"] = f"the source is not here ({error})"
    else:
        if source.onnx is not None:
            task["onnx"] = str(source.onnx)
        else:
            task |= {"checkpoint": str(source.folder), "num_hidden_layers": manifest.decoder.num_layers}
    return run_checks(task, progress)


def run_checks(task: dict[str, Any], progress: Progress) -> VerifyOutcome:
    """Run the worker on `task`; each check becomes a line of `progress` as soon as it is known.

    Keys of `task`: folder; onnx or checkpoint, what to compare with, or neither, then no_reference says why;
    num_hidden_layers, trust_remote_code; native, to check this machine's native sampler too.
    Raises VerificationError if the worker itself fails.
    """
    checks: list[Check] = []
    skipped: list[tuple[str, str]] = []
    error, peak = None, 0
    for line in _lines(task):
        if "check" in line:
            checks.append(Check(**line["check"]))
            progress.say(tick_line(checks[-1]))
        elif "skipped" in line:
            skipped.append((line["skipped"], line["reason"]))
            progress.say(f"  -[-] {line['skipped']}: not checked, {line['reason']}")
        elif "peak" in line:
            peak = int(line["peak"])
        else:
            error = line["error"]
    if error is not None:
        failed = [check.name for check in checks if not check.passed]
        after = f" after these checks had failed: {', '.join(failed)}" if failed else ""
        raise VerificationError(f"verification stopped{after}: {error}")
    return VerifyOutcome(tuple(checks), tuple(skipped), peak)


def tick_line(check: Check) -> str:
    """`-[✓] prefill logits: 3.6e-07 (bound 1e-04; 64 tokens, torch)`."""
    mark = "✓" if check.passed else "x"
    return f"  -[{mark}] {check.name}: {check.difference:.2g} (bound {check.bound:.2g}; {check.detail})"


def _lines(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's results as they come; its death by whatever cause is an error with its last words."""
    command = [sys.executable, "-m", "topw_deploy.export.verification.worker", json.dumps(task)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as last_words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=last_words, text=True, encoding="utf-8")
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
                process.kill()
            process.wait()

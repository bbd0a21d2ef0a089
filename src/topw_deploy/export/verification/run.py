"""Start the verification process for an export or `topw verify`, and collect its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from msgspec import structs

from topw_deploy.errors import SourceError, VerificationError
from topw_deploy.export.options import ExportOptions
from topw_deploy.export.source.resolve import Source, resolve
from topw_deploy.export.verification.quantised import PERPLEXITY
from topw_deploy.manifest import Check, DecoderManifest, Manifest, NotCompared, Note, Verification
from topw_deploy.progress import Progress


@dataclass(frozen=True)
class PairDistance:
    """A measurement: the median distance of pairs of likely tokens."""

    median: float


Result = Check | NotCompared | Note | PairDistance

# Names of the checks that another exporter's decoder may fail; see `verify_in_subprocess`.
LEFT_PADDED = "left-padded batch logits"
RIGHT_PADDED = "right-padded batch logits"


def record_of(results: Iterable[Result]) -> Verification:
    """The record for the manifest: "passed" if everything was compared and all checks passed, else "partial"."""
    found = list(results)
    checks = tuple(result for result in found if isinstance(result, Check))
    not_compared = tuple(result for result in found if isinstance(result, NotCompared))
    return Verification(
        status="partial" if not_compared or failed_checks(checks) else "passed",
        checks=checks,
        not_compared=not_compared,
        notes=tuple(result for result in found if isinstance(result, Note)),
        median_distance=next((result.median for result in found if isinstance(result, PairDistance)), None),
    )


def failed_checks(checks: Iterable[Check]) -> list[Check]:
    """The checks that did not pass."""
    return [check for check in checks if not check.passed]


def format_result(result: Result) -> str:
    """Format a result as a line such as `-[✓] prefill logits: 3.6e-07 (bound 1e-04; 64 tokens, torch)`.

    The mark is ✓ for a check that passed, x for one that failed, - for what was not compared, and i for a note.
    """
    if isinstance(result, Note):
        return f"  -[i] {result.name}: {result.text}"
    if isinstance(result, PairDistance):
        return f"  -[i] median distance of likely pairs: {result.median:.4g}"
    if isinstance(result, NotCompared):
        return f"  -[-] {result.name}: not compared, {result.reason}"
    mark = "✓" if result.passed else "x"
    return f"  -[{mark}] {result.name}: {result.difference:.2g} (bound {result.bound:.2g}; {result.detail})"


_TERMINATION_SECONDS = 5.0  # for the process to end after a signal, before it is killed
_ADVICE = (
    "the weights lose too much when they are rounded: try --dtype int8, or for int4 a larger --average-bits, a smaller "
    "--block-size or a --calibration text of the model's own kind; "
)
_EQUAL_LENGTHS = "so the prompts of a batch must have equal lengths"


def verify_in_subprocess(
    source: Source, options: ExportOptions, folder: Path, progress: Progress
) -> tuple[Verification, bool, int]:
    """Verify a new export. Returns the record for the manifest, whether batches may be padded, and the peak of memory.

    Another exporter's decoder may fail one of the padding checks; the manifest records it, and batches may then not be
    padded. Raises VerificationError for any other failed check.
    """
    task = {
        "folder": str(folder),
        "onnx": str(source.onnx) if source.onnx else None,
        "checkpoint": None if source.onnx else str(source.folder),
        "num_hidden_layers": options.num_hidden_layers,
        "trust_remote_code": options.trust_remote_code,
        "measure": True,
    }
    verification, peak = run_checks(task, progress)
    failed = failed_checks(verification.checks)
    if source.onnx is not None and [check.name for check in failed] in ([LEFT_PADDED], [RIGHT_PADDED]):
        return structs.replace(verification, checks=tuple(map(_add_limit, verification.checks))), False, peak
    if failed:
        worst = failed[0]
        advice = _ADVICE if worst.name == PERPLEXITY else ""
        raise VerificationError(
            f"{len(failed)} of {len(verification.checks)} checks failed (first: {worst.name}, difference "
            f"{worst.difference:.3g}, bound {worst.bound:.3g}); {advice}nothing was kept, --keep-failed keeps the "
            "files."
        )
    return verification, True, peak


def _add_limit(check: Check) -> Check:
    """Add to a failed padding check what follows from it. Its difference becomes finite, as the manifest requires."""
    if check.passed:
        return check
    difference = min(check.difference, sys.float_info.max) if check.difference >= 0 else sys.float_info.max  # NaN
    return structs.replace(check, difference=difference, detail=f"{check.detail}; {_EQUAL_LENGTHS}")


def recheck(
    folder: Path, manifest: Manifest, named: str | None, trust_remote_code: bool, progress: Progress
) -> Verification:
    """Compare a finished export with its source, for `topw verify`.

    Downloads nothing: a source on the hub must be in the local cache. Compares nothing for a sampler-only folder.

    named: the source, a hub id or a folder; None for the manifest's.
    """
    if not isinstance(manifest, DecoderManifest):
        reason = "this is a sampler-only model"
        return record_of([NotCompared("decoder logits", reason), NotCompared("generation", reason)])
    task: dict[str, Any] = {"folder": str(folder), "trust_remote_code": trust_remote_code, "native": True}
    try:
        revision = None if named or manifest.source.get("revision") == "local" else manifest.source.get("revision")
        source = resolve(named or manifest.source["id"], revision=revision, local_files_only=True)
    except SourceError as error:
        task["no_reference"] = f"the source is not available ({str(error).rstrip('.')})"
    else:
        if source.onnx is not None:
            task["onnx"] = str(source.onnx)
        else:
            task |= {"checkpoint": str(source.folder), "num_hidden_layers": manifest.decoder.num_layers}
    return run_checks(task, progress)[0]


def run_checks(task: dict[str, Any], progress: Progress) -> tuple[Verification, int]:
    """Run the verification process, and report results as they arrive. Returns (all results, peak of memory in bytes).

    Keys of `task`:
        folder: the export.
        onnx or checkpoint: the source. Without one, `no_reference` says why.
        num_hidden_layers, trust_remote_code: options for loading the checkpoint.
        native: whether to check this machine's native sampler too.
        measure: whether to measure the median distance of likely pairs too.

    Raises VerificationError if the process fails; failed checks are part of the results.
    """
    answer = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = start(json.dumps(task), errors)
        try:
            for line in cast("IO[str]", process.stdout):  # a pipe
                if line.startswith("{"):
                    answer = json.loads(line)
                else:
                    progress.say(line.rstrip("\n"))
            process.wait()
        finally:
            if process.poll() is None:  # by a signal first: its temporary files may be as large as the model
                process.terminate()
                try:
                    process.wait(_TERMINATION_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
        if answer is None:
            errors.seek(0)
            lines = errors.read().strip().splitlines() or ["no message"]
            raise VerificationError(
                f"the verification ended with exit code {process.returncode} ({lines[-1][:300]}); "
                "report this, or export with --no-verify."
            )
    verification = msgspec.convert(answer["verification"], Verification)
    if answer["error"]:
        failed = [check.name for check in failed_checks(verification.checks)]
        after = f" after these checks had failed: {', '.join(failed)}" if failed else ""
        raise VerificationError(f"verification stopped{after}: {answer['error']}")
    return verification, answer["peak"]


def start(task: str, errors: IO[str]) -> subprocess.Popen[str]:
    """Start the verification process, with a pipe as its standard output.

    task: JSON, see `run_checks`.
    errors: its standard error.
    """
    command = [sys.executable, "-m", "topw_deploy.export.verification.worker", task]
    # Torch's threads would spin while they wait, and on a busy machine take the time of those they wait for.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", env=environment
    )
